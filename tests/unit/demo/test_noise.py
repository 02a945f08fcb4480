"""What noise changes in a model, and what it leaves as it is."""

import tempfile
from pathlib import Path

import pytest

from sglang_patches.demo.noise import agreement, noisy_draft, own_texts, write_noisy_copy
from sglang_patches.demo.variant import WEIGHTS
from tests.support.tiny_model import write_tiny_model

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copied(model, tmp_path):
    def copy(strength: float, seed: int = 0) -> dict:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        write_noisy_copy(model, folder, strength, seed)
        assert {file.name for file in folder.iterdir()} == {file.name for file in model.iterdir()}
        return safetensors.load_file(folder / WEIGHTS)

    return copy


def test_the_blocks_matrices_carry_noise_of_the_given_strength(model, copied):
    source, noisy = safetensors.load_file(model / WEIGHTS), copied(0.25)
    blocks = [name for name, tensor in source.items() if ".layers." in name and tensor.dim() == 2]
    assert len(blocks) == 2 * 7
    for name in blocks:
        strength = (noisy[name] - source[name]).std() / source[name].std()
        assert float(strength) == pytest.approx(0.25, rel=0.05)
    others = source.keys() - blocks
    assert all(torch.equal(noisy[name], source[name]) for name in others)


def test_a_seed_gives_the_same_weights(copied):
    first, again, other = copied(0.1, 1), copied(0.1, 1), copied(0.1, 2)
    name = "model.layers.1.mlp.down_proj.weight"
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first[name], other[name])


def test_agreement_counts_the_answers_positions():
    """Models that know the last token alone: they differ after one token of three."""

    class Successor:
        def __init__(self, after: dict[int, int]) -> None:
            self.after = after

        def __call__(self, ids):
            tokens = torch.tensor([[self.after[token] for token in ids[0].tolist()]])
            return transformers.modeling_outputs.CausalLMOutput(logits=torch.nn.functional.one_hot(tokens, 4))

    target, draft = Successor({0: 1, 1: 2, 2: 0}), Successor({0: 1, 1: 3, 2: 0})
    assert agreement(target, draft, [([0, 1], [2]), ([1], [2, 0])]) == pytest.approx(1 / 3)


def test_a_draft_of_the_demo_model_agrees_about_as_often_as_it_says(demo_model):
    """Three short texts tell .9 from .5; the module's own measurement takes twenty."""
    texts = own_texts(3, 40)
    load = transformers.AutoModelForCausalLM.from_pretrained
    target, good, bad = (
        load(folder, dtype=torch.float32) for folder in (demo_model, noisy_draft(0.9), noisy_draft(0.5))
    )
    assert agreement(target, good, texts) == pytest.approx(0.9, abs=0.08)
    assert agreement(target, bad, texts) == pytest.approx(0.5, abs=0.2)
