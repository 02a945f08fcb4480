import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore_service.engine.packing import MAX_BITS, bits_for, pack, packed_size, unpack


@given(st.integers(1, MAX_BITS), st.data())
def test_what_is_packed_comes_back(bits, data):
    values = np.array(data.draw(st.lists(st.integers(0, (1 << bits) - 1), max_size=70)), dtype=np.int32)
    packed = pack(values, bits)
    assert packed.dtype == np.uint8 and len(packed) == packed_size(len(values), bits)
    assert np.array_equal(unpack(packed, bits, len(values)), values)


def test_the_bytes_are_the_documented_ones():
    """1, 2, 3 in five bits each: 00001, 00010, 00011 from the lowest bit on, then the padding."""
    assert pack(np.array([1, 2, 3], dtype=np.int32), 5).tolist() == [0b01000001, 0b00001100, *[0] * 8]


@pytest.mark.parametrize(("largest", "bits"), [(0, 1), (1, 1), (2, 2), (255, 8), (256, 9), (2**31 - 1, 31)])
def test_bits(largest, bits):
    assert bits_for(largest) == bits
