"""Arrays that go to a device in one copy."""

import numpy as np
import pytest

pytest.importorskip("sglang")

from sglang_patches.draft_process.batches import ALIGNMENT, on_device  # noqa: E402


def test_arrays_keep_their_types_shapes_and_values():
    source = np.random.default_rng(0)
    arrays = {
        "a": source.integers(-(1 << 62), 1 << 62, 3),
        "b": source.integers(0, 99, (2, 5)).astype(np.int32),
        "c": source.random(7, np.float32),
        "none": np.empty(0, np.int64),
        "d": source.integers(0, 99, 1),
    }
    moved = on_device(arrays, "cpu")
    assert list(moved) == list(arrays)
    for name, tensor in moved.items():
        assert tensor.numpy().dtype == arrays[name].dtype and tensor.shape == arrays[name].shape
        np.testing.assert_array_equal(tensor.numpy(), arrays[name])


@pytest.mark.parametrize("count", [1, 3, 24])
def test_each_begins_where_a_kernel_of_triton_expects_it(count):
    """A kernel is compiled for addresses that are multiples of 16, and again for others."""
    moved = on_device({"a": np.zeros(count, np.int32), "b": np.zeros(count), "c": np.zeros(count)}, "cpu")
    assert [tensor.storage_offset() * tensor.itemsize % ALIGNMENT for tensor in moved.values()] == [0, 0, 0]
