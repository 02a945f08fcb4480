"""CRC-32 by ISA-L: files have zlib's values, which the documents promise."""

import mmap
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal.isal_zlib import crc32

from datastore_service.engine.segment import checksum_of

CONTENT = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
values = st.integers(0, 2**32 - 1)


@given(
    start=st.integers(0, 300),
    size=st.integers(0, 5000) | st.sampled_from([1 << 16, (1 << 20) - 300]),
    value=values,
)
def test_values_are_zlib_s_at_every_size_alignment_and_start_value(start, size, value):
    data = CONTENT[start : start + size].data
    assert crc32(data, value) == zlib.crc32(data, value)
    assert crc32(data) == zlib.crc32(data)


def test_every_kind_of_buffer_that_is_checked(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(CONTENT.tobytes())
    expected = zlib.crc32(CONTENT.tobytes())
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert crc32(mapped) == expected
        with memoryview(mapped) as view:
            assert crc32(view) == expected
    for data in (path.read_bytes(), bytearray(CONTENT), np.memmap(path, mode="r"), CONTENT.view(np.uint64)):
        assert crc32(data) == expected


@pytest.mark.parametrize("array", [CONTENT[:0], CONTENT, CONTENT.view(np.int64)[::3], CONTENT.reshape(4, -1)])
def test_the_checksum_of_an_array_is_that_of_its_bytes(array):
    assert checksum_of(array) == zlib.crc32(array.tobytes())
