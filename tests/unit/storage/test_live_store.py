"""A live tier over a folder: what a restart finds, what is refused, what a disk that fails does to it."""

import errno
import json
import os
import re
import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from datastore_service.engine.engine import Engine
from datastore_service.engine.limits import Limits
from datastore_service.engine.live import compactor, fresh_writer, merge_policy
from datastore_service.engine.segment import build_segment
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening, Status
from datastore_service.storage import log
from datastore_service.storage.atomic import TEMPORARY
from datastore_service.storage.checksummed_json import write_checksummed
from datastore_service.storage.errors import StorageError
from datastore_service.storage.folder_store import FolderStore, create_folder
from datastore_service.storage.live_manifest import MANIFEST, LiveManifest, read_live_manifest
from datastore_service.storage.log import log_name
from datastore_service.storage.segment_file import SegmentFile
from datastore_service.storage.snapshots import list_snapshots
from tests.live_text import documents_of, with_provenance

FINGERPRINT = "ab" * 32
VOCAB = 1000
EMPTY = LiveManifest("m", FINGERPRINT, "", VOCAB)


@pytest.fixture(autouse=True)
def small_fresh_text(monkeypatch):
    monkeypatch.setattr(merge_policy, "FRESH_TOKENS", 64)


@pytest.fixture
def folder(tmp_path):
    create_folder(tmp_path / "live", EMPTY)
    return tmp_path / "live"


def opened(folder, limit=1 << 16):
    store = FolderStore(folder, folder.parent / "snapshots")
    return Engine(VOCAB, limits=Limits(live_tokens=limit), store=store)


def duplicate(folder):
    """The files as a kill -9 would leave them; no merge may be running."""
    return Path(shutil.copytree(folder, Path(tempfile.mkdtemp(dir=folder.parent)) / "live"))


def restarted(folder):
    return opened(duplicate(folder))


def document(number):
    return [number, *range(number % 7 + 5)]


def publish(engine, *numbers):
    """The replies' statuses."""
    return [
        engine.step([Entry("s", 0, np.array(document(n), np.int32), opening=Opening(), closing=True)])[
            0
        ].status
        for n in numbers
    ]


def of(numbers):
    return [document(number) for number in numbers]


def check_files(folder):
    """Nothing is there that does not count, and every segment is whole."""
    manifest = read_live_manifest(folder)
    names = {path.name for path in folder.iterdir()}
    logs = {name for name in names if name.endswith(".log")}
    assert names - logs == {MANIFEST, *with_provenance(manifest.segments)}
    assert all(name >= log_name(manifest.first_log) for name in logs)
    for name in manifest.segments:
        file = SegmentFile(folder / name, FINGERPRINT)
        file.verify()
        file.segment.check_integrity()


def test_outputs_are_there_after_a_restart(folder):
    engine = opened(folder)
    assert set(publish(engine, *range(40))) == {Status.OK}
    engine.settle()
    assert engine.stats().log_bytes > 0
    again = opened(folder)  # the first was never closed: as after kill -9
    assert documents_of(again) == of(range(40))
    again.settle()
    assert documents_of(again) == of(range(40))
    assert again.stats().log_bytes == 0, "an earlier process's logs are sealed at once"
    publish(again, 40)
    again.settle()
    check_files(folder)
    assert sorted(documents_of(opened(folder))) == sorted(of(range(41)))


def test_every_change_is_there_after_a_restart(folder):
    engine = opened(folder)
    publish(engine, *range(10))
    engine.settle()
    engine.warmup([np.array(document(n)) for n in range(10, 13)])
    assert sorted(documents_of(restarted(folder))) == sorted(of(range(13)))
    engine.compact()
    assert sorted(documents_of(restarted(folder))) == sorted(of(range(13)))
    engine.flush(Tier.LIVE)
    assert documents_of(restarted(folder)) == []
    publish(engine, 20)
    engine.settle()
    assert documents_of(restarted(folder)) == of([20])
    engine.close()
    check_files(folder)


def test_evicted_text_does_not_come_back(folder):
    engine = opened(folder, limit=500)
    publish(engine, *range(200))
    engine.settle()
    kept = documents_of(engine)
    assert kept == of(range(200 - len(kept), 200))
    assert len(kept) < 100
    again = opened(folder, limit=500)
    assert documents_of(again) == kept
    again.settle()
    check_files(folder)


def test_a_smaller_limit_evicts_at_the_start(folder):
    engine = opened(folder)
    publish(engine, *range(100))
    engine.settle()
    engine = opened(folder, limit=300)
    engine.settle()
    kept = documents_of(engine)
    assert kept == of(range(100 - len(kept), 100)) and len(kept) < 60
    check_files(folder)


def test_leftovers_are_removed_and_other_files_left_alone(folder):
    engine = opened(folder)
    publish(engine, *range(30))
    engine.settle()
    first = read_live_manifest(folder).first_log
    assert first > 1
    for name in ("90000000.seg", "90000000.seg" + TEMPORARY, MANIFEST + TEMPORARY, log_name(first - 1)):
        (folder / name).write_bytes(b"leftover")
    (folder / "notes").write_text("an operator's")
    again = opened(folder)
    assert documents_of(again) == of(range(30))
    again.settle()
    assert (folder / "notes").exists()
    (folder / "notes").unlink()
    check_files(folder)


def test_a_torn_record_is_dropped_with_a_line(folder, caplog):
    publish(opened(folder), 1, 2)
    with (folder / log_name(1)).open("ab") as file:
        file.write(b"\x08\x00")
    assert documents_of(opened(folder)) == of([1, 2])
    (warning,) = [record for record in caplog.records if record.name == log.__name__]
    assert warning.levelname == "WARNING"
    assert "dropped 2 bytes of an unfinished record" in warning.message


def test_a_damaged_log_or_segment_refuses_the_start_and_removes_nothing(folder):
    engine = opened(folder)
    publish(engine, *range(30))
    engine.settle()
    (folder / "90000000.seg").write_bytes(b"leftover")
    log = max(folder.glob("*.log"))
    segment = folder / read_live_manifest(folder).segments[0]
    for path, at in ((log, 70), (segment, 20)):
        data = path.read_bytes()
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(StorageError, match=path.name):
            opened(folder)
        path.write_bytes(data)
    segment.rename(folder / "aside")
    with pytest.raises(StorageError, match=rf"{segment.name}: file: No such file"):
        opened(folder)
    (folder / "aside").rename(segment)
    assert (folder / "90000000.seg").exists()
    assert documents_of(opened(folder)) == of(range(30))


def test_what_a_killed_process_had_not_synced_is_synced_before_it_is_used(folder, monkeypatch):
    """A power failure after the restart must not take what the restart has shown, and counts as synced."""
    publish(opened(folder), 1, 2)
    left = duplicate(folder)
    (path,) = left.glob("*.log")
    synced, fsync = [], os.fsync

    def watched(descriptor):
        fsync(descriptor)
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", watched)
    store = FolderStore(left, left.parent / "snapshots")
    assert [len(documents) for _, documents in store.recover().logs] == [2]
    assert synced[-1] == str(path) and store.stats().unsynced == 0


@pytest.mark.parametrize("bit", [0, 4])
def test_a_manifest_with_any_bit_flipped_is_refused(folder, bit):
    engine = opened(folder)
    publish(engine, *range(30))
    engine.settle()
    path = folder / MANIFEST
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        with pytest.raises(StorageError, match=MANIFEST):
            read_live_manifest(folder)
    for size in range(len(data) - 1):  # the last byte is a newline
        path.write_bytes(data[:size])
        with pytest.raises(StorageError, match=MANIFEST):
            read_live_manifest(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segments": 5}, "segments: missing or not list"),
        ({"segments": [5]}, "segments: not a list of names of segment files"),
        ({"segments": ["../../other/00000001.seg"]}, "segments: not a list of names of segment files"),
        ({"segments": ["/etc/passwd"]}, "segments: not a list of names of segment files"),
        ({"segments": [".."]}, "segments: not a list of names of segment files"),
        ({"segments": [""]}, "segments: not a list of names of segment files"),
        ({"segments": ["a.seg"]}, "segments: not a list of names of segment files"),
        ({"segments": ["00000001.seg", "00000001.seg"]}, "segments: not a list of names of segment files"),
        ({"segments": ["9" * 5000 + ".seg"]}, "segments: not a list of names of segment files"),
        ({"first_log": "1"}, "first_log: missing or not int"),
        ({"first_log": -1}, "first_log: -1 is below 0"),
        ({"first_log": None}, "first_log: missing or not int"),
        ({"vocab_size": True}, "vocab_size: missing or not int"),
        ({"vocab_size": 1.5}, "vocab_size: missing or not int"),
        ({"model": 5}, "model: missing or not str"),
        ({"tokenizer": ["ab"]}, "tokenizer: missing or not str"),
        ({"tenant": None}, "tenant: missing or not str"),
    ],
)
def test_a_manifest_of_other_content_is_refused_by_field(folder, change, message):
    """With a right checksum: another program's, or somebody's who can write here."""
    path = folder / MANIFEST
    fields = json.loads(path.read_text())
    del fields["checksum"]
    write_checksummed(path, fields | change)
    with pytest.raises(StorageError, match=re.escape(f"{path}: {message}")):
        opened(folder)
    for name in change:
        del fields[name]
        write_checksummed(path, fields)
        with pytest.raises(StorageError, match=f"{name}: missing"):
            read_live_manifest(folder)


def test_another_format_names_what_helps(folder):
    path = folder / MANIFEST
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(StorageError, match="format: 3, this program reads 1 to 2: start the specstore that"):
        opened(folder)


class TestSnapshots:
    def test_a_snapshot_has_the_text_of_its_moment(self, folder):
        engine = opened(folder)
        publish(engine, *range(25))
        assert sum(map(len, engine.snapshot("monday"))) == sum(map(len, of(range(25))))
        publish(engine, *range(25, 50))
        engine.compact()
        engine.flush(Tier.LIVE)
        publish(engine, 60)
        engine.restore("monday")
        assert sorted(documents_of(engine)) == sorted(of(range(25)))
        publish(engine, 61)
        engine.settle()
        check_files(folder)
        assert sorted(documents_of(restarted(folder))) == sorted(of([*range(25), 61]))
        (info,) = list_snapshots(folder.parent / "snapshots")
        assert (info.name, info.tokens) == ("monday", sum(map(len, of(range(25)))))

    def test_names_are_not_paths(self, folder):
        engine = opened(folder)
        for name in ("", ".", "..", "../x", "a/b", "/tmp/x", "-x", "a" * 101, "x.tmp", "a\n"):
            with pytest.raises(ValueError, match="^name: "):
                engine.snapshot(name)
            with pytest.raises(ValueError, match="^name: "):
                engine.restore(name)

    def test_taken_missing_and_unstored(self, folder):
        engine = opened(folder)
        publish(engine, 1)
        engine.snapshot("a")
        with pytest.raises(FileExistsError):
            engine.snapshot("a")
        with pytest.raises(FileNotFoundError):
            engine.restore("b")
        with pytest.raises(ValueError, match="in memory alone"):
            Engine(VOCAB).snapshot("a")

    @pytest.mark.parametrize("part", [MANIFEST, "seg"])
    def test_a_damaged_snapshot_changes_nothing(self, folder, part):
        engine = opened(folder)
        publish(engine, 1, 2)
        engine.snapshot("a")
        engine.flush(Tier.LIVE)
        publish(engine, 3)
        (path,) = (folder.parent / "snapshots" / "a").glob(f"*{part}")
        data = bytearray(path.read_bytes())
        data[130] ^= 1
        path.write_bytes(data)
        with pytest.raises(StorageError, match=path.name):
            engine.restore("a")
        assert documents_of(engine) == of([3])
        check_files(folder)

    def test_another_namespace_s_snapshot_is_refused(self, folder):
        engine = opened(folder)
        publish(engine, 1)
        engine.snapshot("a")
        other = folder.parent / "other"
        create_folder(other, LiveManifest("m", FINGERPRINT, "tenant", VOCAB))
        theirs = Engine(VOCAB, store=FolderStore(other, folder.parent / "snapshots"))
        with pytest.raises(StorageError, match=r"manifest\.json: namespace: of .*not this one's"):
            theirs.restore("a")
        assert theirs.stats().tiers[Tier.LIVE].tokens == 0

    def test_a_snapshot_that_fails_leaves_nothing(self, folder, monkeypatch):
        engine = opened(folder)
        publish(engine, *range(30))
        with monkeypatch.context() as broken:
            broken.setattr(os, "link", refusing(errno.ENOSPC))
            with pytest.raises(OSError, match="No space left"):
                engine.snapshot("a")
        assert list((folder.parent / "snapshots").iterdir()) == []
        engine.snapshot("a")
        assert list_snapshots(folder.parent / "snapshots")[0].name == "a"


def refusing(number):
    """Stands for a system call that fails."""

    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


class TestDiskRefuses:
    def test_an_output_that_cannot_be_logged_is_not_published(self, folder, monkeypatch, caplog):
        engine = opened(folder)
        publish(engine, 1)
        with monkeypatch.context() as full:
            full.setattr(os, "write", refusing(errno.ENOSPC))
            assert publish(engine, 2, 3) == [Status.OVER_BUDGET] * 2
            assert documents_of(engine) == of([1])
            assert (engine.stats().log_failures, engine.stats().sessions) == (2, 0)
        assert publish(engine, 4) == [Status.OK]
        engine.settle()
        assert documents_of(engine) == documents_of(restarted(folder)) == of([1, 4])
        lines = [record.message for record in caplog.records if record.name == fresh_writer.__name__]
        assert [line.split(": ")[1] for line in lines] == [
            "an output cannot be logged, so it is not published",
            "works again",
        ]

    def test_a_log_that_cannot_be_begun(self, folder, monkeypatch):
        engine = opened(folder)
        with monkeypatch.context() as full:
            full.setattr(os, "open", refusing(errno.ENOSPC))
            assert publish(engine, 1) == [Status.OVER_BUDGET]
        with monkeypatch.context() as full:
            full.setattr(os, "write", refusing(errno.EIO))
            assert publish(engine, 1) == [Status.OVER_BUDGET]
        assert publish(engine, 2) == [Status.OK]
        engine.settle()
        assert documents_of(engine) == documents_of(restarted(folder)) == of([2])

    @pytest.mark.parametrize("call", ["replace", "fsync"])
    def test_segments_that_cannot_be_written_stay_in_their_logs(self, folder, call, monkeypatch):
        engine = opened(folder)
        with monkeypatch.context() as full:
            full.setattr(os, call, refusing(errno.ENOSPC))
            publish(engine, *range(30))
            engine.settle()
            left = duplicate(folder)
        assert engine.stats().merge_failures > 0
        assert documents_of(engine) == documents_of(opened(left)) == of(range(30))
        engine.settle()
        assert documents_of(engine) == documents_of(restarted(folder)) == of(range(30))
        assert engine.stats().tiers[Tier.LIVE].segments > 0
        check_files(folder)

    def test_a_manifest_that_cannot_be_written_is_written_later(self, folder, monkeypatch):
        engine = opened(folder)
        publish(engine, *range(5))
        replace = os.replace

        def only_segments(source, target):
            if str(target).endswith(MANIFEST):
                raise OSError(errno.EIO, "no manifest")
            replace(source, target)

        with monkeypatch.context() as broken:
            broken.setattr(os, "replace", only_segments)
            publish(engine, *range(5, 30))
            engine.settle()
            assert engine.stats().tiers[Tier.LIVE].segments > 0
            with pytest.raises(OSError, match="no manifest"):
                engine.warmup([np.array(document(50))])
            with pytest.raises(OSError, match="no manifest"):
                engine.compact()
            assert sorted(documents_of(restarted(folder))) == sorted(of(range(30)))
        assert sorted(documents_of(engine)) == sorted(of(range(30))), "a refused warmup adds nothing"
        engine.settle()
        check_files(folder)
        assert sorted(documents_of(restarted(folder))) == sorted(of(range(30)))

    def test_a_flush_that_is_not_stored_is_an_error(self, folder, monkeypatch):
        engine = opened(folder)
        publish(engine, 1, 2)
        engine.settle()
        with monkeypatch.context() as broken:
            broken.setattr(os, "replace", refusing(errno.EROFS))
            with pytest.raises(OSError, match="Read-only"):
                engine.flush(Tier.LIVE)
        assert documents_of(engine) == []
        engine.settle()
        assert documents_of(restarted(folder)) == []
        check_files(folder)

    def test_a_log_that_cannot_be_synced_is_sealed(self, folder, monkeypatch, caplog):
        engine = opened(folder)
        publish(engine, 1, 2)
        assert engine.stats().log_unsynced_bytes > 0
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", refusing(errno.EIO))
            for _ in range(3):
                engine.sync()
            engine.settle()
        assert engine.stats().log_failures == 3
        assert engine.stats().log_unsynced_bytes > 0
        engine.settle()
        engine.sync()
        assert engine.stats().log_unsynced_bytes == 0
        assert engine.stats().tiers[Tier.LIVE].segments == 1
        assert documents_of(engine) == documents_of(restarted(folder)) == of([1, 2])
        assert caplog.text.count("logged text cannot be synced") == 2  # once as it begins, once as it ends


def test_flushes_beside_merges_leave_nothing_behind(folder, monkeypatch):
    """A flush at any moment of a merge: what was published before it is gone, on the disk too."""
    engine = opened(folder)
    real = build_segment

    def flushed_meanwhile(documents, vocab_size):
        segment = real(documents, vocab_size)
        engine.flush(Tier.LIVE)
        return segment

    with monkeypatch.context() as racing:
        racing.setattr(compactor, "build_segment", flushed_meanwhile)
        publish(engine, *range(30))
        engine.settle()
    newest = documents_of(engine)
    assert newest == of(range(30 - len(newest), 30))
    engine.settle()
    check_files(folder)
    assert documents_of(restarted(folder)) == newest


def test_publishing_flushing_and_syncing_at_once(folder):
    """Threads at random; at the end the disk has what memory has."""
    engine = opened(folder)
    stop = threading.Event()
    errors = []

    def repeat(act):
        try:
            while not stop.is_set():
                act()
        except Exception as error:
            errors.append(error)

    def warm():
        engine.warmup([np.array(document(n)) for n in (900, 901)])

    acts = (lambda: engine.flush(Tier.LIVE), engine.sync, engine.compact, warm)
    threads = [threading.Thread(target=repeat, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for n in range(300):
        assert publish(engine, n) == [Status.OK]
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    engine.settle()
    engine.sync()
    assert (engine.stats().log_unsynced_bytes, engine.stats().merge_failures) == (0, 0)
    check_files(folder)
    assert sorted(documents_of(restarted(folder))) == sorted(documents_of(engine))


@pytest.mark.parametrize("call", ["replace", "fsync", "unlink"])
def test_a_disk_that_hangs_holds_up_no_query_and_no_output(folder, call, monkeypatch):
    engine = opened(folder)
    publish(engine, *range(20))
    engine.settle()
    hangs, goes_on = threading.Event(), threading.Event()
    real = getattr(os, call)

    def slow(*arguments, **options):
        hangs.set()
        assert goes_on.wait(60)
        return real(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, slow)
        saving = threading.Thread(target=engine.compact)
        saving.start()
        assert hangs.wait(60)
        assert publish(engine, *range(20, 40)) == [Status.OK] * 20
        query = Entry("q", 0, np.array(document(39)[:3], np.int32), budget=Budget(2), opening=Opening())
        assert engine.step([query])[0].tree.tokens.tolist() == document(39)[3:5]
        goes_on.set()
        saving.join()
    engine.settle()
    assert sorted(documents_of(engine)) == sorted(of(range(40)))


def test_a_closed_store_is_left_alone(folder):
    engine = opened(folder)
    publish(engine, 1)
    engine.close()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    publish(engine, *range(30))
    engine.settle()
    engine.close()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_manifest_says_whose_it_is(folder):
    assert read_live_manifest(folder).namespace == Namespace("m", FINGERPRINT)
