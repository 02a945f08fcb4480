"""Backups of a data directory: what is in them, what they cost, and what is refused."""

import builtins
import os
import sys
import uuid

import numpy as np
import pytest

from datastore_service.engine.engine import Engine
from datastore_service.engine.live import merge_policy
from datastore_service.engine.segment import build_segment
from datastore_service.protocol.types import Entry, Namespace, Opening
from datastore_service.storage import open_files as opening
from datastore_service.storage.backup import back_up, backup_names, read_backup
from datastore_service.storage.backup_store import BACKUPS, OBJECTS, BackupStore
from datastore_service.storage.checksummed_json import checksummed, parse_object
from datastore_service.storage.data_directory import RESTORING, DataDirectory
from datastore_service.storage.errors import StorageError
from datastore_service.storage.manifest import Manifest, write_manifest
from datastore_service.storage.quota_file import Quota
from datastore_service.storage.restore import restore
from datastore_service.storage.segment_file import write_segment
from tests.live_text import documents_of

VOCAB = 100
NAMESPACE = Namespace("m", "ab" * 32, "tenant")


class Service:
    """A data directory with one namespace, open as a service has it. Documents are numbers."""

    def __init__(self, root):
        self.root = root
        root.mkdir(exist_ok=True)
        self.data = DataDirectory(root, VOCAB)
        self.engine = Engine(VOCAB, store=self.data.open(NAMESPACE))

    def publish(self, *numbers):
        for number in numbers:
            tokens = np.array([number, 1, 2, 3], np.int32)
            self.engine.step([Entry("s", 0, tokens, opening=Opening(), closing=True)])

    def close(self):
        self.engine.close()
        self.data.close()


@pytest.fixture
def service(tmp_path):
    service = Service(tmp_path / "data")
    yield service
    service.close()


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    if request.param == "folder":
        return BackupStore(str(tmp_path / "backups of" / "this"))
    return BackupStore(f"memory://{uuid.uuid4()}")


def restored(store, root, name=None):
    """The documents of the namespace in a directory of a backup, by their numbers, and its snapshots' names."""
    assert restore(store, read_backup(store, name or backup_names(store)[-1]), root) == VOCAB
    service = Service(root)
    numbers = [document[0] for document in documents_of(service.engine)]
    snapshots = [snapshot.name for snapshot in service.data.snapshots(NAMESPACE)]
    service.close()
    return numbers, snapshots


def test_a_place_belongs_to_one_directory(service, store, tmp_path):
    """Also after it was restored elsewhere. What had no name yet, as with an earlier version, may be followed by what has one."""
    name = service.root / "directory.json"
    earlier = name.read_bytes()
    name.unlink()
    back_up(service.root, store)
    name.write_bytes(earlier)
    back_up(service.root, store)
    other = Service(tmp_path / "other")
    other.publish(1)
    other.close()
    with pytest.raises(StorageError, match="each needs a destination of its own"):
        back_up(other.root, store)
    assert len(backup_names(store)) == 2
    restored(store, tmp_path / "copy")
    back_up(tmp_path / "copy", store)
    (tmp_path / "copy" / "directory.json").unlink()
    with pytest.raises(StorageError, match="without a name"):
        back_up(tmp_path / "copy", store)


def test_all_of_a_directory_comes_back(service, store, tmp_path):
    service.publish(1, 2)
    service.engine.snapshot("a")
    service.publish(3)
    service.data.keep_quotas({"tenant": Quota(sessions=3)})
    prior = service.root / "prior"
    prior.mkdir()
    write_segment(prior / "0.seg", build_segment([np.arange(9)], VOCAB), NAMESPACE.tokenizer)
    write_manifest(prior, Manifest(NAMESPACE.tokenizer, VOCAB, ("0.seg",)))
    back_up(service.root, store)
    copy = tmp_path / "copy"
    assert restored(store, copy) == ([1, 2, 3], ["a"])
    for part in ("quotas.json", "prior/manifest.json", "prior/0.seg"):
        assert (copy / part).read_bytes() == (service.root / part).read_bytes()
    assert not (copy / RESTORING).exists()
    (snapshot,) = (copy / "snapshots").glob("*/a/*.seg")
    assert snapshot.stat().st_nlink == 2, "the live tier has the same file"
    assert snapshot.stat().st_mtime_ns in {
        path.stat().st_mtime_ns for path in service.root.glob("live/*/*.seg")
    }


def test_a_further_backup_writes_what_is_new(service, store, tmp_path):
    service.publish(*range(10))
    service.engine.compact()
    first = back_up(service.root, store)
    assert first.new == first.backup.nbytes
    service.publish(11)
    second = back_up(service.root, store)
    assert 0 < second.new < 200, "the log of one document"
    assert back_up(service.root, store).new == 0
    names = backup_names(store)
    assert [name[:8] for name in names] == ["00000001", "00000002", "00000003"]
    assert restored(store, tmp_path / "first", names[0])[0] == list(range(10))
    assert restored(store, tmp_path / "second", names[1])[0] == [*range(10), 11]


def test_older_backups_leave_with_what_they_alone_have(service, tmp_path):
    store = BackupStore(f"file://{tmp_path}/kept")
    service.publish(1)
    back_up(service.root, store)
    service.engine.compact()
    objects = tmp_path / "kept" / OBJECTS
    for path in objects.iterdir():
        os.utime(path, (1, 1))
    (objects / "of a call that was killed").touch()
    os.utime(objects / "of a call that was killed", (1, 1))
    (objects / "of a call that goes on").touch()
    os.utime(
        objects / "of a call that goes on", (1 << 33, 1 << 33)
    )  # after the backup, whatever the clock's steps
    written = back_up(service.root, store, keep=1)
    assert [name[:8] for name in written.removed] == ["00000001"]
    (name,) = backup_names(store)
    named = {file.sha256 for file in read_backup(store, name).files}
    assert named | {"of a call that goes on"} == {path.name for path in objects.iterdir()}
    assert restored(store, tmp_path / "copy")[0] == [1]


def test_a_manifest_that_is_replaced_meanwhile_is_read_again(service, store, tmp_path, monkeypatch):
    """The files of the first reading are gone when they are opened."""
    original, readings = opening.read_live_manifest, []

    def read(folder):
        manifest = original(folder)
        if not readings:
            service.publish(3)
            service.engine.compact()
        readings.append(manifest.segments)
        return manifest

    service.publish(1)
    service.engine.compact()
    service.publish(2)
    monkeypatch.setattr(opening, "read_live_manifest", read)
    back_up(service.root, store)
    assert len(readings) == 2 and readings[0] != readings[1]
    assert restored(store, tmp_path / "copy")[0] == [1, 2, 3]


def test_files_that_are_removed_after_their_opening_are_in_the_backup(service, store, tmp_path):
    service.publish(1)
    service.engine.compact()
    service.publish(2)
    back_up(service.root, store, progress=lambda _: service.engine.flush())
    assert service.engine.stats().tiers and documents_of(service.engine) == []
    assert restored(store, tmp_path / "copy")[0] == [1, 2]


def test_a_dropped_namespace_is_no_error(service, store, tmp_path, monkeypatch):
    other = Namespace("other", "ab" * 32)
    service.publish(1)
    service.data.open(other)

    def dropping(folder):
        if folder.name.startswith("other"):
            service.data.remove(other)
        return original(folder)

    original = opening.read_live_manifest
    monkeypatch.setattr(opening, "read_live_manifest", dropping)
    back_up(service.root, store)
    assert restored(store, tmp_path / "copy")[0] == [1]


def test_half_a_record_is_left_out(service, store, tmp_path):
    service.publish(1, 2)
    (log,) = service.root.glob("live/*/*.log")
    whole = log.read_bytes()
    log.write_bytes(whole[:-3])
    backup = back_up(service.root, store).backup
    log.write_bytes(whole)
    (size,) = [file.size for file in backup.files if file.path.endswith(".log")]
    assert size < len(whole) - 3
    assert restored(store, tmp_path / "copy")[0] == [1]


@pytest.mark.parametrize("pattern", ["*.seg", "*.prov", "*.log", "manifest.json"])
def test_a_damaged_file_is_named_and_the_earlier_backup_stays(service, store, tmp_path, pattern):
    service.publish(1)
    service.engine.compact()
    service.publish(2)
    back_up(service.root, store)
    (path,) = service.root.glob(f"live/*/{pattern}")
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match=path.name):
        back_up(service.root, store)
    assert restored(store, tmp_path / "copy")[0] == [1, 2]


def test_a_damaged_backup_is_refused_and_makes_no_directory(service, tmp_path):
    store = BackupStore(str(tmp_path / "kept"))
    service.publish(1)
    backup = back_up(service.root, store).backup
    for path in (tmp_path / "kept" / OBJECTS).iterdir():
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(StorageError, match=f"{OBJECTS}/{path.name}: sha256: does not match"):
            restore(store, backup, tmp_path / "copy")
        with pytest.raises(StorageError, match="restore: not finished: repeat"):
            DataDirectory(tmp_path / "copy", VOCAB)
        path.write_bytes(data)
    assert restored(store, tmp_path / "copy")[0] == [1]


def test_an_object_that_is_gone_is_named(service, tmp_path):
    store = BackupStore(str(tmp_path / "kept"))
    backup = back_up(service.root, store).backup
    for path in (tmp_path / "kept" / OBJECTS).iterdir():
        path.unlink()
    with pytest.raises(StorageError, match=f"{OBJECTS}/[0-9a-f]{{64}}: store: FileNotFoundError"):
        restore(store, backup, tmp_path / "copy")


@pytest.mark.parametrize("path", ["../x", "live/../../x/y", "/etc/passwd", "live/a/..", "live/a", "lock"])
def test_a_backup_writes_nowhere_else(service, tmp_path, path):
    store = BackupStore(str(tmp_path / "kept"))
    name = back_up(service.root, store).backup.name
    file = tmp_path / "kept" / BACKUPS / f"{name}.json"
    fields = parse_object(file, file.read_bytes())
    del fields["checksum"]
    fields["files"][0]["path"] = path
    file.write_bytes(checksummed(fields))
    with pytest.raises(StorageError, match="is no file of a data directory"):
        read_backup(store, name)


def test_a_list_that_was_changed_is_refused(service, tmp_path):
    store = BackupStore(str(tmp_path / "kept"))
    name = back_up(service.root, store).backup.name
    file = tmp_path / "kept" / BACKUPS / f"{name}.json"
    file.write_text(file.read_text().replace('"size": ', '"size": 1'))
    with pytest.raises(StorageError, match="checksum: does not match"):
        read_backup(store, name)
    with pytest.raises(ValueError, match="backup: '../x' is not a name"):
        read_backup(store, "../x")


def test_a_directory_with_anything_in_it_is_refused(service, store, tmp_path):
    backup = back_up(service.root, store).backup
    with pytest.raises(StorageError, match="another process writes here"):
        restore(store, backup, service.root)
    copy = tmp_path / "copy"
    (copy / "lost+found").mkdir(parents=True)
    (copy / "note").touch()
    with pytest.raises(StorageError, match="directory: not empty, it has note"):
        restore(store, backup, copy)
    (copy / "note").unlink()
    assert restored(store, copy) == ([], [])


def test_a_restored_directory_keeps_its_vocabulary(service, store, tmp_path):
    restore(store, back_up(service.root, store).backup, tmp_path / "copy")
    with pytest.raises(StorageError, match=f"vocab_size: {VOCAB}, not {VOCAB + 1}: start with --vocab-size"):
        DataDirectory(tmp_path / "copy", VOCAB + 1)


def test_what_is_no_data_directory(store, tmp_path):
    with pytest.raises(StorageError, match="no data directory of a service: it has no live/"):
        back_up(tmp_path, store)


def test_stores_that_cannot_be_used(monkeypatch):
    with pytest.raises(ValueError, match="backup: nonesuch://x: Protocol not known: nonesuch"):
        BackupStore("nonesuch://x")
    real = builtins.__import__

    def without(name, *rest, **named):
        if name.partition(".")[0] == "fsspec":
            raise ModuleNotFoundError(name)
        return real(name, *rest, **named)

    for module in [name for name in sys.modules if name.partition(".")[0] == "fsspec"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"pip install 'specstore\[backup\]'"):
        BackupStore("memory://x")


def test_a_backup_at_any_time_has_all_that_was_acknowledged(store, tmp_path, monkeypatch):
    """Between any two of the service's calls that change a file, merges too."""
    monkeypatch.setattr(merge_policy, "FRESH_TOKENS", 20)
    service = Service(tmp_path / "data")
    acknowledged, judged, busy = [], [], []

    def judge():
        if not busy:
            busy.append(True)
            name = back_up(service.root, store).backup.name
            judged.append((len(acknowledged), restored(store, tmp_path / f"copy-{len(judged)}", name)[0]))
            busy.clear()

    for name in ("replace", "unlink", "write", "fsync"):
        real = getattr(os, name)

        def watched(*args, real=real, **named):
            judge()
            return real(*args, **named)

        monkeypatch.setattr(os, name, watched)
    for number in range(20):
        service.publish(number)
        acknowledged.append(number)
        service.engine.settle()
    busy.append(True)
    assert len(service.engine._live.view.segments) == 1, "nothing was merged: this shows little"
    assert service.engine.stats().merge_failures == 0 and len(judged) > 60
    for number, found in judged:
        assert found in (acknowledged[:number], acknowledged[: number + 1])
    service.close()
