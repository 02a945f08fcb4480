import pytest

from sglang_patches.namespace import tokenizer_file


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A hub cache that holds one revision of one model, and no network."""
    model = tmp_path / "models--nobody--tiny"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_text("{}")
    (model / "refs").mkdir()
    for name in ("main", "v1"):
        (model / "refs" / name).write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return snapshot


def test_a_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_file(str(tmp_path)) == tmp_path / "tokenizer.json"


@pytest.mark.parametrize("revision", [None, "v1"])
def test_a_hub_name(hub_cache, revision):
    assert tokenizer_file("nobody/tiny", revision).samefile(hub_cache / "tokenizer.json")


def test_what_is_missing_is_named(tmp_path, hub_cache):
    with pytest.raises(ValueError, match=r"no tokenizer\.json in"):
        tokenizer_file(str(tmp_path))
    with pytest.raises(ValueError, match="nobody/other is neither a folder nor a hub model"):
        tokenizer_file("nobody/other")
    with pytest.raises(ValueError, match="nobody/tiny is neither"):
        tokenizer_file("nobody/tiny", "v2")
