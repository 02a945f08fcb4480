"""A deepened target says what the model says that it was made from, with more blocks; a widened one with more weights."""

import pytest

from sglang_patches.demo.noise import own_texts
from sglang_patches.demo.variant import deepened_target, write_deepened, write_widened
from tests.support.tiny_model import texts_of, write_tiny_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
LAYERS, TIMES, WIDER = 2, 3, 5


def _load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _made(folder, write, times):
    """A tiny model's folder, and that of its variant."""
    for name in ("model", "variant"):
        (folder / name).mkdir()
    source = write_tiny_model(folder / "model")
    write(source, folder / "variant", times)
    return source, folder / "variant"


def test_it_has_more_blocks_and_the_same_outputs(tmp_path):
    source, variant = _made(tmp_path, write_deepened, TIMES)
    model, deep = _load(source), _load(variant)
    assert deep.config.num_hidden_layers == len(deep.model.layers) == LAYERS * TIMES
    for text in texts_of(source, 4, 40):
        with torch.inference_mode():
            first, second = (one(torch.tensor([text])).logits for one in (model, deep))
        assert torch.equal(first, second)


def test_every_added_block_computes(tmp_path):
    """None of its inputs' weights is zero, and no two blocks share a tensor."""
    _, variant = _made(tmp_path, write_deepened, TIMES)
    for at, block in enumerate(_load(variant).model.layers):
        silent = {name for name, weight in block.named_parameters() if not weight.any()}
        expected = {"self_attn.o_proj.weight", "mlp.down_proj.weight"} if at % TIMES else set()
        assert silent == expected


def test_the_deepened_demo_model_answers_as_the_demo_model(demo_model):
    model, deep = _load(demo_model), _load(deepened_target())
    assert len(deep.model.layers) == 4 * len(model.model.layers)
    for prompt, _ in own_texts(2, 1):
        answers = [
            one.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=8,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            for one in (model, deep)
        ]
        assert answers[0].sequences.tolist() == answers[1].sequences.tolist()
        largest = (torch.stack(answers[0].logits) - torch.stack(answers[1].logits)).abs().max()
        assert float(largest) < 1e-4  # 0 where this was written


def test_a_widened_one_has_more_weights_and_the_same_outputs(tmp_path):
    source, variant = _made(tmp_path, write_widened, WIDER)
    model, wide = _load(source), _load(variant)
    assert wide.config.intermediate_size == WIDER * model.config.intermediate_size
    for name, weight in wide.named_parameters():
        silent = (weight == 0).float().mean()
        assert float(silent) == (pytest.approx(1 - 1 / WIDER, abs=0.01) if "down_proj" in name else 0), name
    for text in texts_of(source, 4, 40):
        with torch.inference_mode():
            first, second = (one(torch.tensor([text])).logits for one in (model, wide))
        assert torch.allclose(first, second, atol=1e-5)
