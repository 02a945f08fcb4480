"""The data directory: one service at a time, a folder for each namespace."""

import shutil

import numpy as np
import pytest

from datastore_service.engine.engine import Engine
from datastore_service.protocol.types import Entry, Namespace, Opening
from datastore_service.storage.data_directory import DataDirectory, folder_name
from datastore_service.storage.errors import StorageError
from tests.live_text import documents_of

VOCAB = 100
ONE = Namespace("org/some-model", "ab" * 32)
TWO = Namespace("org/some-model", "ab" * 32, "tenant")


def published(directory, namespace, *tokens):
    engine = Engine(VOCAB, store=directory.open(namespace))
    engine.step([Entry("s", 0, np.array(tokens, np.int32), opening=Opening(), closing=True)])
    engine.close()


def test_namespaces_come_back_apart(tmp_path):
    directory = DataDirectory(tmp_path, VOCAB)
    assert directory.namespaces == []
    published(directory, ONE, 1, 2)
    published(directory, TWO, 3)
    directory.close()
    again = DataDirectory(tmp_path, VOCAB)
    assert sorted(again.namespaces, key=lambda n: n.tenant) == [ONE, TWO]
    assert documents_of(Engine(VOCAB, store=again.open(ONE))) == [[1, 2]]
    assert documents_of(Engine(VOCAB, store=again.open(TWO))) == [[3]]
    again.close()


def test_a_second_service_is_kept_out(tmp_path):
    first = DataDirectory(tmp_path, VOCAB)
    for file in tmp_path.iterdir():
        if file.is_file():
            file.unlink()
    with pytest.raises(StorageError, match=f"{tmp_path}: lock: another process writes here"):
        DataDirectory(tmp_path, VOCAB)
    first.close()
    DataDirectory(tmp_path, VOCAB).close()


@pytest.mark.parametrize(
    ("model", "one", "other"),
    [("m", "a b", "a-b"), ("m" * 60, "alice", "eve"), ("m", "t" * 60 + "1", "t" * 60 + "2"), ("m", "-", ".")],
)
def test_tenants_that_look_alike_in_a_folder_s_name_have_folders_apart(tmp_path, model, one, other):
    spaces = [Namespace(model, "a" * 64, tenant) for tenant in (one, other)]
    readable = {folder_name(space).rpartition("-")[0] for space in spaces}
    assert len(readable) == 1, "the readable part tells them apart: this shows nothing"
    assert len({folder_name(space) for space in spaces}) == 2


def test_folder_names_are_readable_and_distinct():
    names = [
        ONE,
        TWO,
        Namespace("org/some-model-tenant", "ab" * 32),
        Namespace("org/some", "ab" * 32, "model-tenant"),
        Namespace("../..", "ab" * 32),
        Namespace("", "cd" * 32, "ü" * 300),
    ]
    folders = [folder_name(name) for name in names]
    assert len(set(folders)) == len(folders)
    assert folders[0].startswith("org-some-model-")
    for folder in folders:
        assert len(folder) < 64 and "/" not in folder and not folder.startswith(".")


def test_a_removed_namespace_is_gone_and_can_be_made_anew(tmp_path):
    directory = DataDirectory(tmp_path, VOCAB)
    published(directory, ONE, 1)
    directory.remove(ONE)
    assert list((tmp_path / "live").iterdir()) == []
    assert documents_of(Engine(VOCAB, store=directory.open(ONE))) == []
    directory.close()


def test_interrupted_making_and_removing_are_cleared_away(tmp_path):
    directory = DataDirectory(tmp_path, VOCAB)
    published(directory, ONE, 1)
    directory.close()
    folder = tmp_path / "live" / folder_name(ONE)
    shutil.copytree(folder, folder.with_name(folder.name + ".tmp"))
    made = tmp_path / "live" / folder_name(TWO)
    made.mkdir()
    (made / "manifest.json.tmp").write_text("{")
    again = DataDirectory(tmp_path, VOCAB)
    assert again.namespaces == [ONE]
    assert list((tmp_path / "live").iterdir()) == [folder]
    again.close()


@pytest.fixture
def filled(tmp_path):
    directory = DataDirectory(tmp_path, VOCAB)
    published(directory, ONE, 1)
    directory.close()
    return tmp_path, tmp_path / "live" / folder_name(ONE)


def test_a_lost_manifest_refuses_the_start(filled):
    path, folder = filled
    (folder / "manifest.json").unlink()
    with pytest.raises(StorageError, match=r"manifest\.json: file: No such file"):
        DataDirectory(path, VOCAB)


def test_a_folder_under_another_s_name_refuses_the_start(filled):
    path, folder = filled
    folder.rename(folder.with_name(folder_name(TWO)))
    with pytest.raises(StorageError, match=r"namespace: .*whose folder is org-some-model.*was it copied"):
        DataDirectory(path, VOCAB)


def test_what_was_moved_aside_is_left_alone(filled, caplog):
    path, folder = filled
    folder.rename(folder.with_name("aside"))
    DataDirectory(path, VOCAB).close()
    assert (path / "live" / "aside").is_dir()
    assert "not a namespace's folder, left alone" in caplog.text


def test_another_vocabulary_refuses_the_start(filled):
    with pytest.raises(StorageError, match="vocab_size: 100, not 101: start with --vocab-size 100"):
        DataDirectory(filled[0], VOCAB + 1)


def test_a_tokenizer_that_is_no_fingerprint(tmp_path):
    directory = DataDirectory(tmp_path, VOCAB)
    with pytest.raises(ValueError, match=r"^namespace.tokenizer: 't' is not a fingerprint of 64"):
        directory.open(Namespace("m", "t"))
    assert list((tmp_path / "live").iterdir()) == []
    directory.close()
