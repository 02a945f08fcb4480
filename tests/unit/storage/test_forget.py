"""Forgetting a subject in files: segments, logs, snapshots, what a failure leaves, and text of earlier formats."""

import errno
import json
import os
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore_service.engine.live import merge_policy
from datastore_service.engine.provenance import Subject
from datastore_service.protocol.types import Entry, Opening
from datastore_service.storage import live_segment, search, snapshots
from datastore_service.storage.checksummed_json import write_checksummed
from datastore_service.storage.errors import StorageError
from datastore_service.storage.folder_store import create_folder
from datastore_service.storage.live_manifest import MANIFEST, read_live_manifest
from datastore_service.storage.live_segment import SUFFIX, read_provenance
from datastore_service.storage.snapshots import list_snapshots, remove_old_snapshots
from tests.damage import overwrite
from tests.live_text import documents_of
from tests.unit.storage.test_live_store import EMPTY, check_files, opened, restarted

USERS = [Subject.named("user", f"u{number}") for number in range(5)]


@pytest.fixture(autouse=True)
def small_fresh_text(monkeypatch):
    monkeypatch.setattr(merge_policy, "FRESH_TOKENS", 64)


@pytest.fixture
def folder(tmp_path):
    create_folder(tmp_path / "live", EMPTY)
    return tmp_path / "live"


def text(number):
    return [number, *range(100, 120)]


def publish(engine, *numbers):
    for number in numbers:
        opening = Opening(user=f"u{number % 5}")
        engine.step([Entry("s", 0, np.array(text(number), np.int32), opening=opening, closing=True)])


def of_others(numbers, *users):
    return [text(number) for number in numbers if number % 5 not in users]


def files_with(folder, number):
    """The files below the folder's parent that have a document's bytes."""
    pattern = np.array(text(number), "<u2").tobytes()
    paths = [path for path in folder.parent.rglob("*") if path.is_file()]
    return [path.name for path in paths if pattern in path.read_bytes()]


def test_no_file_has_it_and_a_restart_finds_what_is_left(folder):
    engine = opened(folder)
    publish(engine, *range(20))
    engine.settle()
    engine.snapshot("a")
    publish(engine, *range(20, 30))
    engine.settle()
    assert files_with(folder, 1) and files_with(folder, 26)
    assert len(engine.forget([USERS[1]])) == 6 + 4, "of the tier and of the snapshot"
    assert not any(files_with(folder, number) for number in range(1, 30, 5))
    assert sorted(documents_of(engine)) == of_others(range(30), 1)
    engine.settle()
    assert sorted(documents_of(restarted(folder))) == of_others(range(30), 1)
    check_files(folder)
    engine.restore("a")
    assert sorted(documents_of(engine)) == of_others(range(20), 1)
    assert read_live_manifest(folder).forgetting == frozenset()


def test_a_snapshot_of_nothing_else_is_left_empty_and_keeps_its_age(folder):
    engine = opened(folder)
    publish(engine, 1, 6)
    engine.snapshot("a")
    publish(engine, 2)
    engine.snapshot("b")
    made = [info.created for info in list_snapshots(folder.parent / "snapshots")]
    os.utime(folder.parent / "snapshots" / "a" / MANIFEST, (1, 1))
    engine.forget([USERS[1]])
    listed = list_snapshots(folder.parent / "snapshots")
    assert [(info.name, info.tokens, info.damage) for info in listed] == [("a", 0, ""), ("b", 21, "")]
    assert [info.created for info in listed] == made
    engine.restore("a")
    assert documents_of(engine) == []


def test_what_could_not_be_finished_is_finished_by_the_next_start(folder, monkeypatch):
    engine = opened(folder)
    publish(engine, *range(20))
    engine.snapshot("a")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(snapshots, "write_live_segment", full)
        with pytest.raises(OSError, match="No space"):
            engine.forget(USERS[1:3])
    assert read_live_manifest(folder).forgetting == set(USERS[1:3])
    assert files_with(folder, 1), "the snapshot has it"
    again = opened(folder)
    again.settle()
    assert not files_with(folder, 1) and not files_with(folder, 2)
    assert read_live_manifest(folder).forgetting == frozenset()
    assert sorted(documents_of(again)) == of_others(range(20), 1, 2)


def test_a_running_service_finishes_it_with_the_next_merge(folder, monkeypatch):
    engine = opened(folder)
    publish(engine, *range(20))
    engine.snapshot("a")
    with monkeypatch.context() as broken:
        broken.setattr(snapshots, "write_live_manifest", lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            engine.forget([USERS[1]])
    engine.settle()
    assert not files_with(folder, 1)


@pytest.mark.parametrize("kind", ["segment", "snapshot"])
def test_damage_that_may_hide_the_text_is_told(folder, kind):
    engine = opened(folder)
    publish(engine, *range(20))
    engine.snapshot("a")
    engine.settle()
    if kind == "segment":
        engine.take_out(set(engine.segments()[:1]))
        with pytest.raises(OSError, match=r"\.seg: damaged, so whose text it has is not known"):
            engine.forget([USERS[1]])
    else:
        publish(engine, *range(20, 60))
        engine.compact()  # the snapshot's files are its own
        named = np.array(
            text(1), "<u2"
        ).tobytes()  # another segment has nothing of the subject, and is not opened
        path = next(
            path for path in (folder.parent / "snapshots" / "a").glob("*.seg") if named in path.read_bytes()
        )
        overwrite(path, 128, b"\xff")
        with pytest.raises(StorageError, match="tokens: checksum does not match"):
            engine.forget([USERS[1]])
    assert read_live_manifest(folder).forgetting == {USERS[1]}


def test_a_search_reads_all_files_and_says_what_it_finds(folder):
    engine = opened(folder)
    publish(engine, *range(20))
    engine.snapshot("a")
    short = [np.array([1], np.int32)]
    before = engine.search([USERS[1]], [np.array(text(1), np.int32), np.array(text(99), np.int32), *short])
    assert (before.documents, before.texts, before.found) == (4 + 4 + 4, 2, 1), "queries, files, snapshot"
    removed = engine.forget([USERS[1]])
    after = engine.search([USERS[1]], removed)
    assert (after.documents, after.texts, after.found) == (0, 4, 0)
    assert after.files == sum(path.is_file() for path in folder.parent.rglob("*"))
    (folder / "stray.tmp").write_bytes(b"\0" + removed[0].astype("<u2").tobytes())
    assert engine.search([USERS[1]], removed).found == 1


def test_a_snapshot_leaves_at_its_greatest_age(folder):
    engine = opened(folder)
    kept = folder.parent / "snapshots"
    publish(engine, 1)
    engine.snapshot("a")
    (info,) = list_snapshots(kept)
    assert remove_old_snapshots(kept, info.created) == []
    assert remove_old_snapshots(kept, info.created + 0.001) == ["a"]
    assert list(kept.iterdir()) == []
    assert remove_old_snapshots(folder.parent / "none", 0) == []


# Text of earlier formats


def make_old(folder):
    """The folder as an earlier version would have written it: nothing says whose text it is."""
    for path in folder.glob("*" + SUFFIX):
        path.unlink()
    fields = json.loads((folder / MANIFEST).read_text())
    for name in ("checksum", "created", "forgetting"):
        del fields[name]
    write_checksummed(folder / MANIFEST, fields | {"format": 1})
    for path in folder.glob("*.log"):
        path.write_bytes(old_log(path.read_bytes()))
    for path in folder.iterdir():
        os.utime(path, (1000, 1000))


def old_log(data, version=1, named=0):
    """named: bytes of each record's provenance that the version has."""
    header = data[:8] + struct.pack("<I", version) + data[12:56]
    written = (header + struct.pack("<I", zlib.crc32(header))).ljust(64, b"\0")
    at = 64
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        payload = data[at + 12 : at + 12 + named] + data[at + 12 + 40 : at + 12 + length]
        size = struct.pack("<I", len(payload))
        written += size + struct.pack("<II", zlib.crc32(size), zlib.crc32(payload)) + payload
        at += 12 + length
    return written


def test_text_of_an_earlier_format_is_nobodys_and_as_old_as_its_file(folder):
    engine = opened(folder)
    publish(engine, *range(20))
    engine.snapshot("a")
    engine.settle()
    publish(engine, 20)
    engine.close()
    make_old(folder)
    make_old(folder.parent / "snapshots" / "a")
    again = opened(folder)
    assert sorted(documents_of(again)) == [text(number) for number in range(21)]
    assert again._live.view.oldest == 1000
    assert again.forget(USERS) == []
    publish(again, 21)
    again.compact()
    assert [len(again.forget([user])) for user in USERS[:3]] == [0, 1, 0], "the new text is somebody's"
    again.settle()
    manifest = read_live_manifest(folder)
    assert manifest.format == 2
    assert all(len(read_provenance((folder / name).with_suffix(SUFFIX))) for name in manifest.segments)
    assert sorted(documents_of(restarted(folder))) == [text(number) for number in range(21)]
    again.restore("a")
    again.settle()
    assert sorted(documents_of(again)) == [text(number) for number in range(20)]
    assert again._live.view.oldest == 1000
    assert sorted(documents_of(restarted(folder))) == [text(number) for number in range(20)]


def old_provenance(data):
    """Of version 1."""
    rows = b"".join(data[at : at + 24] for at in range(24, len(data), 40))
    content = data[16:24] + rows
    return data[:8] + struct.pack("<II", 1, zlib.crc32(content)) + content


def test_text_that_does_not_say_where_it_was_published_is_shared_with_nobody(folder):
    """It is still of whom it was."""
    engine = opened(folder)
    publish(engine, *range(20))
    engine.compact()
    publish(engine, 20)
    engine.close()
    for path in folder.glob("*.log"):
        path.write_bytes(old_log(path.read_bytes(), version=2, named=24))
    for path in folder.glob("*" + SUFFIX):
        path.write_bytes(old_provenance(path.read_bytes()))
    again = opened(folder)
    assert again.published.last == 0
    publish(again, 21)
    assert [text.tolist() for text, _ in again.published_here(0)] == [list(text(21))]
    assert len(again.forget([USERS[0]])) == 5
    again.compact()
    assert restarted(folder).waiting(0, 1 << 63) == 1


def test_a_segment_without_its_file_is_refused(folder):
    """Else its text would be nobody's."""
    engine = opened(folder)
    publish(engine, *range(20))
    engine.compact()
    engine.close()
    next(folder.glob("*" + SUFFIX)).unlink()
    with pytest.raises(StorageError, match=rf"{SUFFIX}: file: No such file"):
        opened(folder)


@pytest.mark.parametrize("at", range(24 + 24))
def test_a_changed_byte_of_that_file_is_refused(folder, at):
    engine = opened(folder)
    publish(engine, *range(20))
    engine.compact()
    engine.close()
    path = next(folder.glob("*" + SUFFIX))
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match=rf"{SUFFIX}: (magic|version|checksum): "):
        opened(folder)


@given(st.data())
def test_the_finder_finds_what_bytes_find(data):
    """Few letters, so that patterns share their middles and occur in one another."""
    letters = st.sampled_from(b"ab")
    patterns = data.draw(st.sets(st.lists(letters, min_size=32, max_size=40).map(bytes), max_size=8))
    text = bytes(data.draw(st.lists(letters, max_size=100)))
    for pattern in data.draw(st.lists(st.sampled_from(sorted(patterns) or [b""]), max_size=3)):
        text += pattern
    found = search.Finder(patterns).found_in(text)
    assert found == {pattern for pattern in patterns if pattern in text}


def test_a_finder_looks_across_the_borders_of_what_it_reads_at_a_time(monkeypatch):
    monkeypatch.setattr(search, "_CHUNK", 7)
    pattern, text = bytes(range(40)), bytes(100)
    for at in range(60):
        assert search.Finder([pattern]).found_in(text[:at] + pattern + text[at + 40 :]) == {pattern}
    assert search.Finder([pattern]).found_in(text) == set()
    assert search.Finder([]).found_in(text) == set()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_segment_that_cannot_be_kept_leaves_no_text(moment, folder, monkeypatch):
    """Its documents are in the fresh text still, and may be forgotten there."""
    engine = opened(folder)
    for number in range(5):
        text = np.arange(number, number + 50, dtype=np.int32)
        engine.step([Entry("s", tokens=text, opening=Opening(user="ada"), closing=True)])
    write = live_segment.write_segment

    def fails(*words):
        if moment == "after":
            write(*words)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(live_segment, "write_segment", fails)
        engine.settle()
    assert engine.stats().merge_failures
    assert not [path for path in folder.iterdir() if path.suffix in (".seg", SUFFIX)]
    ada = {Subject.named("user", "ada")}
    removed = engine.forget(ada)
    found = engine.search(ada, removed)
    assert (len(removed), found.documents, found.found) == (5, 0, 0)
