import contextlib
import dataclasses
import errno
import os
import resource
import signal
import struct
import subprocess
import sys
import textwrap
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datastore_service.engine.engine import Engine
from datastore_service.engine.segment import PARTS, Segment, build_segment
from datastore_service.protocol.types import Budget, Entry, Opening
from datastore_service.storage.errors import StorageError
from datastore_service.storage.segment_file import HEADER_BYTES, SegmentFile, write_segment

FINGERPRINT = "ab" * 32
OTHER = "cd" * 32


def written(tmp_path, documents=((1, 2, 3), (), (4, 5)), vocab_size=300):
    path = tmp_path / "a.seg"
    segment = build_segment([np.array(document, dtype=np.int64) for document in documents], vocab_size)
    write_segment(path, segment, FINGERPRINT)
    return path, segment


@pytest.mark.parametrize("vocab_size", [10, 255, 256, 65_536, 65_537, 1 << 31])
@pytest.mark.parametrize("documents", [(), ((),), ((9,),), ((1, 2, 3), (), (4, 5) * 100)])
def test_a_segment_comes_back_whole_and_read_only(tmp_path, documents, vocab_size):
    path, segment = written(tmp_path, documents, vocab_size)
    file = SegmentFile(path, FINGERPRINT)
    file.verify()
    file.segment.check_integrity()
    for name in ("tokens", "suffixes", "offsets", "keys"):
        ours, theirs = getattr(file.segment, name), getattr(segment, name)
        assert np.array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    with pytest.raises(ValueError, match="read-only"):
        file.segment.offsets[0] = 1
    assert os.listdir(tmp_path) == ["a.seg"]


def test_a_mapped_segment_answers_queries(tmp_path):
    path, _ = written(tmp_path)
    engine = Engine(300, [SegmentFile(path).segment])
    entry = Entry("s", 0, np.array([1, 2], dtype=np.int32), budget=Budget(2), opening=Opening())
    assert engine.step([entry])[0].tree.tokens.tolist() == [3]


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path, _ = written(tmp_path)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(StorageError, match=r"a\.seg: length: "):
            SegmentFile(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(StorageError, match=r"a\.seg: length: "):
        SegmentFile(path)


def test_any_flipped_bit_of_the_header_is_seen_at_open(tmp_path):
    path, _ = written(tmp_path)
    data = path.read_bytes()
    for position in range(HEADER_BYTES):
        for bit in (0, 7):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(StorageError, match=r"a\.seg: (magic|version|header): .+"):
                SegmentFile(path)


def descriptors_of(path):
    """How many this process has of the file."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, by whomever
            found += os.readlink(f"/proc/self/fd/{descriptor}") == str(path)
    return found


def test_an_open_file_takes_one_descriptor(tmp_path):
    path, _ = written(tmp_path)
    assert descriptors_of(path) == 0
    segments = [SegmentFile(path).segment for _ in range(20)]
    assert descriptors_of(path) == len(segments)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_bit_of_the_body_is_seen_by_verify(tmp_path, data):
    path, segment = written(tmp_path, [range(50), range(70)])
    content = bytearray(path.read_bytes())
    part = data.draw(st.sampled_from(["tokens", "suffixes", "offsets", "keys"]))
    mapped = SegmentFile(path).segment
    array = getattr(mapped, part)
    begin = array.ctypes.data - mapped.tokens.ctypes.data + HEADER_BYTES
    position = begin + data.draw(st.integers(0, array.nbytes - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(StorageError, match=rf"a\.seg: {part}: "):
        SegmentFile(path).verify()


def test_other_versions_tokenizers_and_files(tmp_path):
    path, _ = written(tmp_path)
    with pytest.raises(StorageError, match=f"tokenizer: built with {FINGERPRINT}, not {OTHER}"):
        SegmentFile(path, OTHER)
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 8, 3)
    path.write_bytes(data)
    with pytest.raises(StorageError, match="version: 3, this program reads 2$"):
        SegmentFile(path)
    path.write_bytes(b"not a segment file" * 20)
    with pytest.raises(StorageError, match="magic: "):
        SegmentFile(path)
    with pytest.raises(StorageError, match=r"missing\.seg: file: No such file"):
        SegmentFile(tmp_path / "missing.seg")


def test_a_header_that_lies_with_a_right_checksum_is_refused(tmp_path):
    path, _ = written(tmp_path)
    data = bytearray(path.read_bytes())
    for offset, value, field in ((12, 4, "width"), (64, 1 << 40, "size"), (72, 9, "length")):
        damaged = bytearray(data)
        struct.pack_into("<Q" if offset != 12 else "<I", damaged, offset, value)
        struct.pack_into("<I", damaged, 104, zlib.crc32(damaged[:104]))
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match=f"{field}: "):
            SegmentFile(path)


def replaced(segment: Segment, part: str, value: int | list[int]) -> Segment:
    if isinstance(value, list):
        value = np.array(value, getattr(segment, part).dtype)
    return dataclasses.replace(segment, **{part: value})


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("tokens", [1, 2, 3, 100, 254, 100], "tokens: id 254 outside the vocabulary of 100"),
        ("tokens", [1, 2, 3, 100, 4, 5], "tokens: a document does not end with the separator"),
        ("offsets", [0, 0, 6], "offsets: not int64 rising from 0 to 6"),
        ("offsets", [0, 1 << 40, 6], "offsets: not int64 rising from 0 to 6"),
        ("offsets", [0, -9, 6], "offsets: not int64 rising from 0 to 6"),
        ("separator", 254, "separator: 254 is above 100"),
        ("keys", [], "keys: not one uint64 for each 16 positions"),
    ],
)
def test_what_a_query_would_read_past_is_refused_whatever_its_checksum(tmp_path, part, values, message):
    segment = build_segment([np.array([1, 2, 3]), np.array([4])], 100)
    path = tmp_path / "a.seg"
    write_segment(path, replaced(segment, part, values), FINGERPRINT)
    with pytest.raises(StorageError, match=rf"a\.seg: {message}"):
        SegmentFile(path).verify()


def test_a_fingerprint_has_64_digits(tmp_path):
    with pytest.raises(ValueError, match="fingerprint has 64"):
        write_segment(tmp_path / "a.seg", build_segment([], 5), "abc")


def _killed_at(call, path, number):
    """Runs a writer of `number`s that kills itself (SIGKILL) when it reaches os.<call>."""
    program = f"""
        import os, signal
        import numpy as np
        from datastore_service.engine.segment import PARTS, Segment, build_segment
        from datastore_service.storage.segment_file import write_segment
        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)
        os.{call} = die
        write_segment({str(path)!r}, build_segment([np.full(1000, {number})], 300), {FINGERPRINT!r})
    """
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=120).returncode


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_writer_killed_before_the_rename_leaves_the_old_file(tmp_path, call):
    path, segment = written(tmp_path)
    assert _killed_at(call, path, 7) == -signal.SIGKILL
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.seg", "a.seg.tmp"}
    survivor = SegmentFile(path)
    survivor.verify()
    assert np.array_equal(survivor.segment.tokens, segment.tokens)
    write_segment(path, build_segment([np.full(10, 8)], 300), FINGERPRINT)
    assert SegmentFile(path).segment.document(0).tolist() == [8] * 10
    assert os.listdir(tmp_path) == ["a.seg"]


def test_a_failing_writer_leaves_nothing_behind(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        write_segment(tmp_path / "a.seg", build_segment([], 300), FINGERPRINT)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("part", range(3))
def test_a_disk_that_is_full_says_so_wherever_it_is(tmp_path, part):
    """A limit on the length of files, which ends a write within each of the parts, stands for the disk's."""
    segment = build_segment([np.arange(90_000) % 1000], 1000)
    ends = np.cumsum([128, *(getattr(segment, name).nbytes for name in PARTS)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(ends[part] + ends[part + 1]) // 2, hard))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            write_segment(tmp_path / "a.seg", segment, "ab" * 32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []
