"""A head that is trained says more of what its model says than one that is not, and its folder has what SGLang reads."""

import json
import sys

import pytest

pytest.importorskip("sglang")
torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from sglang_patches.training.__main__ import main  # noqa: E402
from sglang_patches.training.answers import Text  # noqa: E402
from sglang_patches.training.heads import (  # noqa: E402
    Eagle3,
    read_layers,
    train_head,  # noqa: E402
)
from tests.support.tiny_model import SPELLING_VOCABULARY, texts_of, write_spelling_model  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_spelling_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def texts(model):
    return [Text(text[:4], text[4:]) for text in texts_of(model, 24, 48)]


def test_training_makes_it_right_more_often(model, texts, tmp_path):
    losses = []
    (tmp_path / "short").mkdir()
    begun = train_head(model, texts, tmp_path / "short", 1, lambda step: None)
    (tmp_path / "long").mkdir()
    trained = train_head(model, texts, tmp_path / "long", 12, lambda step: losses.append(step.loss))
    assert trained[0] > 1.5 * begun[0] and trained[0] > 4 / SPELLING_VOCABULARY
    assert losses[-1] < 0.8 * losses[0]


def test_its_folder_has_what_sglang_reads(model, texts, tmp_path):
    train_head(model, texts, tmp_path, 1, lambda step: None)
    config, weights = (
        json.loads((tmp_path / "config.json").read_text()),
        load_file(tmp_path / "model.safetensors"),
    )
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == 1
    assert config["draft_vocab_size"] == SPELLING_VOCABULARY == len(weights["d2t"])
    assert weights["t2d"].sum() == SPELLING_VOCABULARY and not weights["d2t"].any()
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (64, 2 * 64)
    assert weights["fc.weight"].shape == (64, 64 * len(read_layers(2)))


def test_answers_that_are_too_few_or_too_short_are_refused(model, texts, tmp_path):
    for given in (texts[:1], [Text([2, 3], [4])] * 5):
        with pytest.raises(ValueError, match="^answers: . of more than 3 tokens, give at least 2"):
            train_head(model, given, tmp_path, 1, lambda step: None)


def test_it_reads_states_from_three_depths():
    assert read_layers(30) == [2, 15, 27] and read_layers(32) == [2, 16, 29]
    assert read_layers(2) == [0, 1]


def test_a_chain_sees_its_text_and_its_own_steps_alone(model):
    """What lies behind a chain's beginning does not change it: the head drafts without it."""
    from transformers import LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(model)
    head = Eagle3(config, [0, 1], torch.arange(SPELLING_VOCABULARY)).eval()
    states, embedded = torch.randn(9, 2 * 64), torch.randn(9, 64)
    changed = states.clone()
    changed[5:] += 1
    with torch.inference_mode():
        told, other = head.unroll(states, embedded, 3), head.unroll(changed, embedded, 3)
    for step, (one, two) in enumerate(zip(told, other, strict=True)):
        assert len(one) == 9 - step
        assert torch.allclose(one[:5], two[:5], atol=1e-5) and not torch.allclose(one[5:], two[5:], atol=1e-5)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--model", "nowhere", "--answers", "a", "--out", "{out}"], 1, "nowhere"),
        (["--model", "{model}", "--answers", "{model}/none.jsonl", "--out", "{out}"], 1, "none.jsonl"),
        (["--model", "{model}", "--answers", "a", "--out", "{model}"], 1, "is not empty"),
        (
            ["--model", "{model}", "--answers", "a", "--out", "{out}", "--epochs", "0"],
            2,
            "epochs: 0 is below 1",
        ),
    ],
)
def test_what_cannot_be_trained_is_said_in_a_line(model, tmp_path, monkeypatch, capsys, words, status, said):
    given = [word.format(model=model, out=tmp_path / "out") for word in words]
    monkeypatch.setattr(sys, "argv", ["training", "head", *given])
    with pytest.raises(SystemExit) as ended:
        sys.exit(main())
    assert ended.value.code == status and said in capsys.readouterr().err.splitlines()[-1]
