import json

import pytest

from datastore_service.storage.errors import StorageError
from datastore_service.storage.fingerprint import tokenizer_fingerprint
from tests.unit.storage.conftest import WORDS, write_tokenizer


def edited(folder, change):
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return tokenizer_fingerprint(folder)


def test_is_the_same_for_the_same_meaning(tokenizer_folder):
    expected = tokenizer_fingerprint(tokenizer_folder)
    path = tokenizer_folder / "tokenizer.json"
    assert tokenizer_fingerprint(path) == expected
    document = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(document.items())), indent=7))
    assert tokenizer_fingerprint(tokenizer_folder) == expected
    assert edited(tokenizer_folder, lambda d: d.update(truncation={"max_length": 4})) == expected


def test_both_spellings_of_merges_mean_the_same(tokenizer_folder):
    pairs = edited(tokenizer_folder, lambda d: d["model"].update(merges=[["a", "b"]]))
    assert edited(tokenizer_folder, lambda d: d["model"].update(merges=["a b"])) == pairs
    assert edited(tokenizer_folder, lambda d: d["model"].update(merges=["b a"])) != pairs


@pytest.mark.parametrize("part", ["vocab", "added", "pre_tokenizer"])
def test_changes_with_what_decides_the_ids(tokenizer_folder, part):
    before = tokenizer_fingerprint(tokenizer_folder)

    def change(document):
        if part == "vocab":
            document["model"]["vocab"]["k"] = 11
        elif part == "added":
            document["added_tokens"].append({"id": 11, "content": "<x>", "special": True})
        else:
            document["pre_tokenizer"] = None

    assert edited(tokenizer_folder, change) != before


def test_is_stable_across_releases(tmp_path):
    """A constant: segment files carry the value, so computing it differently would orphan them all."""
    folder = tmp_path / "t"
    folder.mkdir()
    document = {"added_tokens": [], "normalizer": None, "pre_tokenizer": None}
    document["model"] = {"type": "BPE", "vocab": {"a": 0, "é": 1, "aé": 2}, "merges": [["a", "é"]]}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    expected = "760fce0c45983791c7653993fe205b9c36e8b37bed29f569879e8644c63ea82a"
    assert tokenizer_fingerprint(folder) == expected


def test_unusable_files_are_named(tmp_path, tokenizer_folder):
    with pytest.raises(StorageError, match=r"tokenizer\.json: file: No such file"):
        tokenizer_fingerprint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(StorageError, match=r"tokenizer\.json: file: not JSON"):
        tokenizer_fingerprint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StorageError, match=r"tokenizer\.json: model: missing"):
        tokenizer_fingerprint(tmp_path)
    other = write_tokenizer(tmp_path / "other", [*WORDS, "k"])
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(tokenizer_folder)
