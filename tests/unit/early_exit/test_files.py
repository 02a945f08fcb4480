"""The file of early exits, and to which model it belongs."""

import json
import shutil

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from sglang_patches.early_exit.file import FORMAT, About, Adapter, EarlyExits  # noqa: E402
from sglang_patches.early_exit.fingerprint import model_fingerprint, model_folder  # noqa: E402

ABOUT = About("f" * 32, 30, 16, {"8": (0.2, 0.5), "15": (0.3, 0.6)})


@pytest.fixture
def exits():
    torch.manual_seed(0)
    return EarlyExits(ABOUT, {8: Adapter(16), 15: Adapter(16)})


def test_what_is_saved_is_loaded(exits, tmp_path):
    exits.save(tmp_path / "exits.safetensors")
    loaded = EarlyExits.load(tmp_path / "exits.safetensors")
    assert loaded.about.fingerprint == ABOUT.fingerprint and loaded.about.layers == 30
    assert {layer: tuple(recall) for layer, recall in loaded.about.recall.items()} == ABOUT.recall
    states = torch.randn(3, 16)
    for layer, adapter in exits.adapters.items():
        assert torch.equal(loaded.adapters[layer](states), adapter(states))


def test_the_middle_one_is_taken_unless_another_is_named(exits):
    assert exits.layer(0) == 15 and exits.layer(8) == 8
    with pytest.raises(ValueError, match=r"9 is none of its layers, which are \[8, 15\]"):
        exits.layer(9)


def test_another_file_is_refused_by_name(tmp_path):
    (tmp_path / "text").write_text("no tensors")
    save_file({"a": torch.ones(1)}, tmp_path / "tensors")
    for name in ("text", "tensors"):
        with pytest.raises(ValueError, match=f"{tmp_path / name} holds no early exits"):
            EarlyExits.load(tmp_path / name)
    with pytest.raises(OSError):
        EarlyExits.load(tmp_path / "missing")


def sound() -> tuple[dict, dict]:
    """The tensors of one adapter, and what they belong to."""
    about = {"fingerprint": "f" * 32, "layers": 30, "hidden": 16, "recall": {"8": [0.2, 0.5]}}
    return {"8.down.weight": torch.zeros(8, 16), "8.up.weight": torch.zeros(16, 8)}, about


@pytest.mark.parametrize(
    ("tensors", "about", "named"),
    [
        ({}, "[]", "Expected `object`"),
        ({}, "", "truncated"),
        ({}, "{", "truncated"),
        ({}, {"hidden": None}, r"\$.hidden"),
        ({}, {"hidden": "16"}, r"\$.hidden"),
        ({}, {"hidden": 10**9}, "for states of width 1000000000"),
        ({}, {"hidden": -16}, "for states of width -16"),
        ({}, {"layers": 8}, "layer 8 of 8"),
        ({}, {"layers": []}, r"\$.layers"),
        ({}, {"recall": {}}, r"recall of \[\]"),
        ({}, {"recall": {"8": [0.5]}}, r"\$.recall"),
        ({}, {"fingerprint": 5}, r"\$.fingerprint"),
        ({"8.down.weight": torch.zeros(16, 8)}, {}, "layer 8: "),
        ({"8.down.weight": torch.zeros(8, 16, dtype=torch.int32)}, {}, "floating point"),
        ({"8.bias": torch.zeros(8)}, {}, "layer 8: "),
        ({"9.down.weight": torch.zeros(8, 16)}, {}, "layer 9"),
        ({"0.down.weight": torch.zeros(8, 16)}, {}, "layer 0"),
        ({"other": torch.zeros(8)}, {}, "other"),
    ],
)
def test_a_file_of_other_content_is_refused_by_name(tmp_path, tensors, about, named):
    whole, fields = sound()
    file = tmp_path / "exits"
    save_file(whole, file, {"format": FORMAT, "about": json.dumps(fields)})
    assert list(EarlyExits.load(file).adapters) == [8]
    text = about if isinstance(about, str) else json.dumps(fields | about)
    save_file(whole | tensors, file, {"format": FORMAT, "about": text})
    with pytest.raises(ValueError, match=f"{file} holds no early exits: .*{named}"):
        EarlyExits.load(file)


def test_a_file_without_tensors_is_refused_by_name(tmp_path):
    save_file({}, tmp_path / "exits", {"format": FORMAT, "about": json.dumps(sound()[1])})
    with pytest.raises(ValueError, match="it has no tensors"):
        EarlyExits.load(tmp_path / "exits")


@pytest.mark.parametrize(("weights", "percent"), [(14.8e9, 0.177), (32.8e9, 0.080)])
def test_an_adapter_is_as_small_as_the_paper_says(weights, percent):
    """Appendix E.2, less than 0.18% of Qwen3-14B and 0.08% of Qwen3-32B, both with hidden states of 5120."""
    with torch.device("meta"):
        size = sum(weight.numel() for weight in Adapter(5120).parameters())
    assert size == 5120**2 and round(100 * size / weights, 3) == percent


def test_a_fingerprint_follows_the_weights_and_nothing_else(tmp_path):
    folder, copy = tmp_path / "model", tmp_path / "copy"
    folder.mkdir()
    save_file({"a": torch.arange(200_000)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    first = model_fingerprint(folder)
    shutil.copytree(folder, copy)
    (copy / "config.json").write_text('{"transformers_version": "5"}')
    assert model_fingerprint(copy) == first
    other = torch.arange(200_000)
    other[-1] += 1
    save_file({"a": other}, copy / "model.safetensors")
    assert model_fingerprint(copy) != first


def test_a_model_that_is_not_here_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no weights"):
        model_fingerprint(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="nobody/nothing is neither a folder nor a model"):
        model_folder("nobody/nothing")
    assert model_folder(str(tmp_path)) == tmp_path
