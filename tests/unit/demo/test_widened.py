"""A widened target says what the model says that it was made from, with more weights."""

import pytest

from sglang_patches.demo.widened import write_widened
from tests.support.tiny_model import texts_of, write_tiny_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
TIMES = 5


def test_it_has_more_weights_and_the_same_outputs(tmp_path):
    for name in ("model", "wide"):
        (tmp_path / name).mkdir()
    source = write_tiny_model(tmp_path / "model")
    write_widened(source, tmp_path / "wide", TIMES)
    model, wide = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (source, tmp_path / "wide")
    )
    assert wide.config.intermediate_size == TIMES * model.config.intermediate_size
    for name, weight in wide.named_parameters():
        silent = (weight == 0).float().mean()
        assert float(silent) == (pytest.approx(1 - 1 / TIMES, abs=0.01) if "down_proj" in name else 0), name
    for text in texts_of(source, 4, 40):
        with torch.inference_mode():
            first, second = (one(torch.tensor([text])).logits for one in (model, wide))
        assert torch.allclose(first, second, atol=1e-5)
