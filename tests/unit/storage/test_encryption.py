"""A data directory with encryption keys: what is on the disk, what a start does with earlier files, and which it refuses."""

import logging
import os
import re
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from datastore_service.engine.engine import Engine
from datastore_service.engine.live import merge_policy
from datastore_service.engine.provenance import Subject
from datastore_service.protocol.types import Entry, Namespace, Opening
from datastore_service.storage.backup import back_up, backup_names, read_backup
from datastore_service.storage.backup_store import OBJECTS, BackupStore
from datastore_service.storage.data_directory import DataDirectory
from datastore_service.storage.encryption_keys import NO_KEYS, OperatorKeys
from datastore_service.storage.errors import StorageError
from datastore_service.storage.quota_file import Quota
from datastore_service.storage.restore import restore
from datastore_service.storage.rewriting import encrypt_folders
from datastore_service.storage.share_file import ShareState
from tests.live_text import documents_of

VOCAB = 1000
NAMESPACE = Namespace("m", "ab" * 32, "tenant")
OLD, NEW = {"old": bytes(range(32))}, {"new": bytes(range(1, 33))}
KEYS, ROTATED = OperatorKeys(OLD, "keys"), OperatorKeys(NEW | OLD, "keys")
ALONE = OperatorKeys(NEW, "keys")
MAGIC = b"SPECENC\0"
FORMAT = Path(__file__).parents[3] / "docs" / "storage-format.md"


@pytest.fixture(autouse=True)
def small_fresh_text(monkeypatch):
    monkeypatch.setattr(merge_policy, "FRESH_TOKENS", 64)


class Service:
    """A data directory with one namespace, open as a service has it."""

    def __init__(self, root, keys=NO_KEYS):
        root.mkdir(exist_ok=True)
        self.data = DataDirectory(root, VOCAB, keys)
        self.engine = Engine(VOCAB, store=self.data.open(NAMESPACE))

    def publish(self, *numbers):
        for number in numbers:
            opening = Opening(user=f"u{number % 5}")
            tokens = np.array(text(number), np.int32)
            self.engine.step([Entry("s", 0, tokens, opening=opening, closing=True)])

    def numbers(self):
        return sorted(document[0] for document in documents_of(self.engine))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.settle()
        self.engine.close()
        self.data.close()


def text(number):
    return [number, *range(100, 120)]


def filled(root, keys=NO_KEYS):
    """Segments, logs, a snapshot with some of the segments and a file of each other kind."""
    with Service(root, keys) as service:
        service.publish(*range(27))
        service.engine.settle()
        service.engine.snapshot("a")
        service.publish(27, 28)  # too few to be sorted, so that the snapshot's segments stay the live tier's
        service.data.keep_quotas({"tenant": Quota(sessions=3)})
        service.data.keep_share(ShareState())
    kinds = {path.suffix for path in files(root)}
    assert kinds == {".seg", ".prov", ".log", ".json"}
    return root


def files(root):
    return sorted(path for path in root.rglob("*") if path.is_file())


def key_in(path):
    """The name of the key in a file's header, "" if it is not encrypted."""
    data = path.read_bytes()
    at = data[:100].find(MAGIC)
    return data[at + 12 : at + 28].rstrip(b"\0").decode() if at in (0, 64) else ""


def never_encrypted():
    """The names in the documented list."""
    section = FORMAT.read_text().split("## Encryption", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"`([^`]+\.json)`", section))


def check_encrypted(root, key):
    """Whatever kind of file it is: it is encrypted with that key, or documented as one that never is, and has no text."""
    patterns = [
        np.array(text(number), kind).tobytes() for number in range(30) for kind in ("<u2", "<i4", "<i8")
    ]
    for path in files(root):
        assert key_in(path) == ("" if path.name in never_encrypted() else key), path
        data = path.read_bytes()
        assert not any(pattern in data for pattern in patterns), path
        assert "u1" not in path.read_text(errors="replace") or path.suffix != ".json"


def test_every_file_with_text_is_encrypted_and_read_again(tmp_path):
    root = filled(tmp_path / "data", KEYS)
    check_encrypted(root, "old")
    with Service(root, KEYS) as service:
        assert service.numbers() == list(range(29))
        (snapshot,) = service.data.snapshots(NAMESPACE)
        assert snapshot.damage == "" and snapshot.tokens == 27 * len(text(0))
        service.engine.compact()
        service.publish(29)
        check_encrypted(root, "old")
        service.engine.restore("a")
        assert service.numbers() == list(range(27))
    check_encrypted(root, "old")


def test_without_keys_nothing_is_encrypted(tmp_path):
    check = {key_in(path) for path in files(filled(tmp_path / "data"))}
    assert check == {""}


@pytest.mark.parametrize(("before", "after", "key"), [(NO_KEYS, KEYS, "old"), (KEYS, ROTATED, "new")])
def test_a_start_encrypts_what_earlier_ones_left(tmp_path, caplog, before, after, key):
    root = filled(tmp_path / "data", before)
    links = {path.stat().st_nlink for path in root.glob("snapshots/*/*/*.seg")}
    assert links == {2}
    times = {path.name: path.stat().st_mtime_ns for path in root.glob("live/*/*.seg")}
    with caplog.at_level(logging.INFO):
        DataDirectory(root, VOCAB, after).close()
    assert "files encrypted with the first key" in caplog.text
    check_encrypted(root, key)
    assert {path.stat().st_nlink for path in root.glob("snapshots/*/*/*.seg")} == {2}
    assert {path.name: path.stat().st_mtime_ns for path in root.glob("live/*/*.seg")} == times
    inodes = [path.stat().st_ino for path in files(root)]
    DataDirectory(root, VOCAB, OperatorKeys({key: after.secrets[key]})).close()
    assert [path.stat().st_ino for path in files(root)] == inodes, (
        "nothing is left to do, and no other key is needed"
    )
    with Service(root, after) as service:
        assert service.numbers() == list(range(29))
        service.engine.restore("a")
        assert service.numbers() == list(range(27))


class Killed(BaseException):
    """In place of the end of the process: nothing of what would follow an error is done."""


@pytest.fixture(scope="module")
def unencrypted(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_policy, "FRESH_TOKENS", 64)
        yield filled(tmp_path_factory.mktemp("plain") / "data")


def killed_at(root, name, number, monkeypatch):
    """Whether the encryption of a directory was killed, at the call of that name and number."""
    real, unlink, calls = getattr(os, name), Path.unlink, iter(range(number))
    killed = []

    def call(*args, **named):
        if next(calls, None) is None:
            killed.append(True)
            raise Killed
        return real(*args, **named)

    def unlink_unless_killed(*args, **named):
        return None if killed else unlink(*args, **named)

    with monkeypatch.context() as broken:
        broken.setattr(os, name, call)
        broken.setattr(Path, "unlink", unlink_unless_killed)
        with suppress(Killed):
            encrypt_folders(root.glob("live/*"), root.glob("snapshots/*/*"), KEYS)
    return bool(killed)


@pytest.mark.parametrize("name", ["replace", "link", "utime", "fsync"])
def test_a_start_that_is_killed_at_any_call_is_repeated(unencrypted, tmp_path, monkeypatch, name):
    """Each time with a second directory of the same files, in which no file may be written to."""
    before = {path: path.read_bytes() for path in files(unencrypted)}
    for number in count():
        root = tmp_path / str(number)
        shutil.copytree(unencrypted, root, copy_function=os.link)
        if not killed_at(root, name, number, monkeypatch):
            break
        killed_at(
            root, "urandom", 0, monkeypatch
        )  # and then once more, with the next file open and nothing in it
        check_stored(root)
    assert number > 1
    assert {path: path.read_bytes() for path in files(unencrypted)} == before


def check_stored(root):
    data = DataDirectory(root, VOCAB, KEYS)
    recovered = data.open(NAMESPACE).recover()
    logged = [tokens for _, documents in recovered.logs for tokens, _ in documents]
    assert sorted([*numbers_in(recovered.segments), *(int(tokens[0]) for tokens in logged)]) == list(
        range(29)
    )
    assert numbers_in(data.open(NAMESPACE).open_snapshot("a")) == list(range(27))
    data.close()
    check_encrypted(root, "old")


def numbers_in(segments):
    return sorted(int(segment.document(i)[0]) for segment in segments for i in range(segment.documents))


WRONG = [
    (NO_KEYS, "key: encrypted with the key 'old', give it with --encryption-keys"),
    (ALONE, "key: encrypted with the key 'old', which keys has not"),
    (OperatorKeys({"old": bytes(32)}, "f"), "key: 'old' of f is not the key of that name"),
]


@pytest.mark.parametrize("part", ["live", "snapshots"])
@pytest.mark.parametrize(("keys", "why"), WRONG, ids=["none", "missing", "wrong"])
def test_a_start_without_the_key_is_refused_and_changes_nothing(tmp_path, part, keys, why):
    """Also where only a snapshot needs it."""
    root = filled(tmp_path / "data", KEYS)
    if part == "snapshots":
        with Service(root, KEYS) as service:
            service.engine.flush()
            service.data.remove(NAMESPACE)
    before = {path: path.read_bytes() for path in files(root)}
    with pytest.raises(StorageError, match=f"{root}/{part}/.*: {re.escape(why)}"):
        DataDirectory(root, VOCAB, keys)
    assert {path: path.read_bytes() for path in files(root)} == before
    DataDirectory(root, VOCAB, KEYS).close()


@pytest.mark.parametrize("pattern", ["*.seg", "*.prov", "*.log"])
def test_what_is_damaged_is_not_encrypted_as_if_it_were_whole(tmp_path, pattern):
    root = filled(tmp_path / "data")
    path = sorted(root.glob(f"live/*/{pattern}"))[-1]
    flip(path)
    with pytest.raises(StorageError, match=path.name):
        DataDirectory(root, VOCAB, KEYS)
    assert key_in(path) == ""


def test_a_damaged_snapshot_is_left_as_it_is_and_named(tmp_path, caplog):
    root = filled(tmp_path / "data")
    path = sorted(root.glob("snapshots/*/*/*.seg"))[-1]
    data = path.read_bytes()
    path.unlink()  # the live tier has the same file
    path.write_bytes(data)
    flip(path)
    with Service(root, KEYS) as service:
        assert service.numbers() == list(range(29))
        with pytest.raises(StorageError, match=path.name):
            service.engine.restore("a")
    assert f"damaged snapshot, not encrypted: {path}" in caplog.text


def flip(path):
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def test_forgotten_text_is_in_no_file_and_found_where_it_is(tmp_path):
    root = tmp_path / "data"
    subjects = [Subject.named("user", "u1")]
    with Service(root, KEYS) as service:
        service.publish(*range(20))
        service.engine.settle()
        service.engine.snapshot("a")
        service.publish(*range(20, 28))
        kept = {path: path.read_bytes() for path in files(root) if path.suffix in (".seg", ".log")}
        removed = service.engine.forget(subjects)
        assert service.engine.search(subjects, removed).documents == 0
        found = service.engine.search(subjects, removed)
        assert (found.found, found.texts) == (0, 6)
        check_encrypted(root, "old")
        kinds = set()
        for path, data in kept.items():
            if not path.exists():
                path.write_bytes(data)
                if service.engine.search(subjects, removed).found:
                    kinds.add(path.suffix)
                path.unlink()
        assert kinds == {".seg", ".log"}, "a file that a failing disk gave back"
        assert service.numbers() == [number for number in range(28) if number % 5 != 1]


@pytest.mark.parametrize("before", [NO_KEYS, KEYS], ids=["plain", "encrypted"])
def test_a_backup_needs_no_key_and_its_restoration_does(tmp_path, before):
    root, store = filled(tmp_path / "data", before), BackupStore(str(tmp_path / "kept"))
    backup = back_up(root, store).backup
    if before is KEYS:
        stored = {key_in(path) for path in (tmp_path / "kept" / OBJECTS).iterdir()}
        assert stored == {"old", ""}, "as the files are"
        with pytest.raises(StorageError, match="key: encrypted with the key 'old', which keys has not"):
            restore(store, backup, tmp_path / "copy", keys=ALONE)
    copy = tmp_path / "copy"
    restore(store, read_backup(store, backup_names(store)[-1]), copy, keys=ROTATED)
    check_encrypted(copy, "new")
    assert {path.stat().st_nlink for path in copy.glob("snapshots/*/*/*.seg")} == {2}
    with Service(copy, ALONE) as service:
        assert service.numbers() == list(range(29))


@pytest.mark.parametrize("pattern", ["*.seg", "*.prov", "*.log"])
def test_a_backup_sees_damage_without_a_key(tmp_path, pattern):
    root, store = filled(tmp_path / "data", KEYS), BackupStore(str(tmp_path / "kept"))
    path = sorted(root.glob(f"live/*/{pattern}"))[-1]
    flip(path)
    with pytest.raises(StorageError, match=path.name):
        back_up(root, store)
    assert backup_names(store) == []
