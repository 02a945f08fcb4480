import struct
import zlib

import numpy as np
import pytest

from datastore_service.engine.segment import build_segment
from datastore_service.storage.errors import StorageError
from datastore_service.storage.manifest import Manifest, open_segments, write_manifest
from datastore_service.storage.segment_file import SegmentFile
from datastore_service.storage.upgrade import upgrade_segments

FINGERPRINT = "ab" * 32


def write_version_1(path, segment):
    """As version 1 of this program did: int32 suffixes, and a table of the first four tokens of every 64th."""
    suffixes, size = segment.suffix_array(), len(segment.tokens)
    leads = np.zeros((-(-size // 64), 4), np.uint32)
    for block, start in enumerate(suffixes[::64]):
        first = segment.tokens[start : start + 4]
        leads[block, : len(first)] = first
    arrays = segment.tokens, suffixes, segment.offsets, leads
    header = struct.pack(
        "<8sIIQQ32sQQQ4I", b"SPECSEG\0", 1, segment.tokens.itemsize, segment.vocab_size, segment.separator,
        bytes.fromhex(FINGERPRINT), size, segment.documents, len(leads), *(zlib.crc32(a.tobytes()) for a in arrays),
    )  # fmt: skip
    content = (header + struct.pack("<I", zlib.crc32(header))).ljust(128, b"\0")
    for array in arrays:
        content += array.tobytes() + bytes(-array.nbytes % 64)
    path.write_bytes(content)


def prior_of_version_1(tmp_path, vocab_size):
    rng = np.random.default_rng(0)
    segments = [
        build_segment([rng.integers(0, min(vocab_size, 90), 300), rng.integers(0, 9, 50)], vocab_size)
        for _ in range(2)
    ]
    for i, segment in enumerate(segments):
        write_version_1(tmp_path / f"{i}.seg", segment)
    write_manifest(tmp_path, Manifest(FINGERPRINT, vocab_size, ("0.seg", "1.seg")))
    return segments


@pytest.mark.parametrize("vocab_size", [100, 50_000, 200_000])
def test_a_prior_of_version_1_is_refused_with_the_command_and_then_rewritten(tmp_path, vocab_size):
    segments = prior_of_version_1(tmp_path, vocab_size)
    with pytest.raises(
        StorageError, match=r"0\.seg: version: 1, .*; `specstore upgrade` rewrites its directory"
    ):
        open_segments(tmp_path)
    assert upgrade_segments(tmp_path) == 2
    for new, old in zip(open_segments(tmp_path, FINGERPRINT), segments, strict=True):
        new.check_integrity()
        for name in ("tokens", "suffixes", "offsets", "keys"):
            assert np.array_equal(getattr(new, name), getattr(old, name))
    assert upgrade_segments(tmp_path) == 0


def test_an_interrupted_upgrade_goes_on(tmp_path):
    prior_of_version_1(tmp_path, 100)
    names = []

    def stop(name):
        names.append(name)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upgrade_segments(tmp_path, stop)
    assert names == ["0.seg"]
    SegmentFile(tmp_path / "0.seg").verify()
    assert upgrade_segments(tmp_path) == 1


def test_a_damaged_file_is_refused_and_kept(tmp_path):
    prior_of_version_1(tmp_path, 100)
    content = bytearray((tmp_path / "0.seg").read_bytes())
    content[130] ^= 1
    (tmp_path / "0.seg").write_bytes(content)
    with pytest.raises(StorageError, match=r"0\.seg: tokens: checksum"):
        upgrade_segments(tmp_path)
    assert (tmp_path / "0.seg").read_bytes() == content
