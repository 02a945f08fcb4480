"""Write-ahead logs: what is read back after every cut, every flipped bit and every refused write."""

import errno
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datastore_service.engine.provenance import digest, provenance_of
from datastore_service.protocol.types import Opening
from datastore_service.storage.errors import StorageError
from datastore_service.storage.log import HEADER_BYTES, LogWriter, read_log

FINGERPRINT = "ab" * 32
VOCAB = 300
DOCUMENTS = [[1, 2, 3], [299], [4, 5, 6, 7, 8, 9], [0, 0]]
WHOSE = provenance_of(Opening(conversation="c", user="u"), published=7)
WHOSE["origin"], WHOSE["number"] = 8, 9
HEAD_BYTES = 12 + 40  # of a record
RECORD_BYTES = [HEAD_BYTES + 2 * len(document) for document in DOCUMENTS]


def ids(tokens):
    return np.array(tokens, dtype=np.int32)


def written(path, documents=DOCUMENTS, vocab_size=VOCAB):
    writer = LogWriter(path, FINGERPRINT, vocab_size)
    for document in documents:
        writer.append(ids(document), WHOSE)
    writer.close()
    return path.read_bytes()


def read(path, vocab_size=VOCAB):
    contents = read_log(path, FINGERPRINT, vocab_size)
    return [document.tolist() for document, _ in contents.documents], contents.torn


@pytest.fixture
def path(tmp_path):
    return tmp_path / "00000001.log"


@pytest.mark.parametrize(
    ("vocab_size", "width"), [(255, 1), (256, 2), (65_536, 2), (65_537, 4), (1 << 31, 4)]
)
def test_documents_come_back_in_order(path, vocab_size, width):
    documents = [[0, 1, vocab_size - 1], [5] * 1000]
    data = written(path, documents, vocab_size)
    assert read(path, vocab_size) == (documents, 0)
    assert len(data) == HEADER_BYTES + 2 * HEAD_BYTES + 1003 * width


def test_the_layout_is_the_documented_one(path):
    data = written(path, [[1, 2]])
    assert data[:8] == b"SPECLOG\x00"
    assert int.from_bytes(data[8:12], "little") == 3
    assert int.from_bytes(data[12:16], "little") == 2
    assert int.from_bytes(data[16:24], "little") == VOCAB
    assert data[24:56] == bytes.fromhex(FINGERPRINT)
    assert data[60:64] == bytes(4)
    assert int.from_bytes(data[64:68], "little") == 44
    assert [int.from_bytes(data[at : at + 8], "little") for at in range(76, 116, 8)] == [
        digest("c"),
        digest("u"),
        7,
        8,
        9,
    ]
    assert data[116:] == bytes([1, 0, 2, 0])


def test_a_log_cut_anywhere_has_the_records_before_the_cut(path):
    data = written(path)
    ends = HEADER_BYTES + np.cumsum([0, *RECORD_BYTES])
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        complete = int((ends[1:] <= size).sum())
        documents, torn = read(path)
        assert documents == DOCUMENTS[:complete], size
        assert torn == size - (ends[complete] if complete or size > HEADER_BYTES else 0)


def fails(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("cut", ["at once", "at the next append"])
def test_what_a_full_disk_has_taken_of_a_record_is_cut_off(cut, path, monkeypatch):
    """It may be text that is forgotten before the next append. To cut needs no space, but may fail too."""
    with monkeypatch.context() as full:
        if cut != "at once":
            full.setattr(os, "ftruncate", fails)
        write = os.write
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:-3]))
        writer = LogWriter(path, FINGERPRINT, VOCAB)
        with pytest.raises(OSError, match="No space left"):
            writer.append(np.array([1, 2, 3], np.int32), provenance_of(Opening(), 0))
        assert (path.stat().st_size == 0) == (cut == "at once")
    writer.append(np.array([4], np.int32), provenance_of(Opening(), 0))
    writer.close()
    assert read(path) == ([[4]], 0)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=9),
    data=st.data(),
)
def test_any_log_cut_anywhere(path, documents, data):
    path.unlink(missing_ok=True)
    whole = written(path, documents)
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    found, _ = read(path)
    assert found == documents[: len(found)]


@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_anywhere_is_refused(path, bit):
    """In the last record too, which is all there: it was acknowledged."""
    data = written(path)
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        with pytest.raises(StorageError, match=r"00000001\.log: ") as refused:
            read(path)
        assert refused.value.field.startswith("offset ") or at < HEADER_BYTES


@pytest.mark.parametrize("pages", [1, 2])
def test_a_last_record_whose_pages_were_never_written_is_dropped(path, pages):
    """As a power failure may leave it: its length is in the file, its last pages are zero."""
    long = [299] * 5000  # 10,000 bytes, in three pages of the file
    data = written(path, [*DOCUMENTS, long])
    kept = len(data) // 4096 * 4096 - (pages - 1) * 4096
    path.write_bytes(data[:kept].ljust(len(data), b"\0"))
    assert read(path) == (DOCUMENTS, HEAD_BYTES + 2 * len(long))
    path.write_bytes(data[: kept - 1] + b"\x07" + data[kept:])
    with pytest.raises(StorageError, match="checksum does not match"):
        read(path)


def test_blocks_that_were_added_and_never_written_are_dropped(path):
    data = written(path)
    for size in (1, 12, 4096):
        path.write_bytes(data + bytes(size))
        assert read(path) == (DOCUMENTS, size)
        path.write_bytes(bytes(size))
        assert read(path) == ([], size)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"X", "magic: "),
        (8, b"\x05", "version: 5, this program reads 1 to 4: start the specstore that wrote it"),
        (12, b"\x04", "header: checksum does not match"),
        (60, b"\x01", "header: checksum does not match"),
    ],
)
def test_a_header_that_is_not_ours_is_refused(path, at, value, message):
    data = written(path)
    path.write_bytes(data[:at] + value + data[at + 1 :])
    with pytest.raises(StorageError, match=rf"00000001\.log: {message}"):
        read(path)


def test_another_tokenizer_or_vocabulary_is_refused(path):
    written(path)
    with pytest.raises(StorageError, match=r"tokenizer: written with abab.*, not cdcd"):
        read_log(path, "cd" * 32, VOCAB)
    with pytest.raises(StorageError, match="vocab_size: 300 in 2 bytes a token, the namespace has 301"):
        read(path, VOCAB + 1)
    path.write_bytes(b"nothing")
    with pytest.raises(StorageError, match="header: 7 bytes"):
        read(path)


@pytest.mark.parametrize("first", [True, False])
def test_a_refused_write_leaves_no_trace(path, first, monkeypatch):
    """The first part of a record reaches a disk that is then full; the next append begins where it began."""
    writer = LogWriter(path, FINGERPRINT, VOCAB)
    expected = []
    if not first:
        writer.append(ids([1]), WHOSE)
        expected = [[1]]
    write = os.write
    for half in (lambda d, data: write(d, data[: len(data) // 2]), _no_space):
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space left"):
            writer.append(ids([2, 3]), WHOSE)
        monkeypatch.setattr(os, "write", write)
        assert read(path)[0] == expected
    writer.append(ids([4]), WHOSE)
    assert read(path) == ([*expected, [4]], 0)
    assert writer.size == path.stat().st_size


def _no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_is_synced_is_counted_and_a_failed_sync_stays_failed(path, monkeypatch):
    writer = LogWriter(path, FINGERPRINT, VOCAB)
    writer.sync()
    writer.append(ids([1]), WHOSE)
    assert writer.synced == 0
    writer.sync()
    assert writer.synced == writer.size == path.stat().st_size
    writer.append(ids([2]), WHOSE)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.raises(OSError, match="broken"):
            writer.sync()
    with pytest.raises(OSError, match="an earlier sync failed"):
        writer.sync()
    assert writer.synced < writer.size
    assert read(path) == ([[1], [2]], 0)
