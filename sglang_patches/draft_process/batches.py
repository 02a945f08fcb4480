"""What a draft forward gives SGLang, as `ForwardBatch.init_new` would: the tensors that its backends take on the device, and those that
they take on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.utils import is_pin_memory_available

SCRATCH = 1  # the first scratch row; row 0 is SGLang's, for the padding of captured graphs
ALIGNMENT = 16  # bytes: Triton compiles a kernel anew for an address that is not a multiple of it


class BatchFields(NamedTuple):
    """Fields of a ForwardBatch, by name. on_device: with SGLang's types."""

    on_device: dict[str, np.ndarray]
    on_host: dict[str, object]


def decode_fields(
    rows: Sequence[int], tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]
) -> BatchFields:
    """One token a sequence. rows: of the table. slots: where its KV goes."""
    lengths = np.array(positions, np.int64) + 1
    on_device = {
        "input_ids": np.array(tokens, np.int64),
        "req_pool_indices": np.array(rows, np.int64),
        "seq_lens": lengths,
        "out_cache_loc": np.array(slots, np.int64),
        "positions": lengths - 1,
    }
    on_host = {
        "forward_mode": ForwardMode.DECODE,
        "batch_size": len(rows),
        "seq_lens_sum": int(lengths.sum()),
        "seq_lens_cpu": torch.from_numpy(lengths),
    }
    return BatchFields(on_device, on_host)


class Stretch(NamedTuple):
    """The next tokens of a text, after its first `start`. row: of the table. tokens: int32. slots: int32, where their KV goes."""

    row: int
    start: int
    tokens: np.ndarray
    slots: np.ndarray


def extend_fields(stretches: Sequence[Stretch]) -> BatchFields:
    """Next tokens of several texts."""
    starts = np.array([stretch.start for stretch in stretches], np.int32)
    counts = np.array([len(stretch.tokens) for stretch in stretches], np.int32)
    lengths = (starts + counts).astype(np.int64)
    on_device = {
        "input_ids": np.concatenate([stretch.tokens for stretch in stretches]).astype(np.int64),
        "req_pool_indices": np.array([stretch.row for stretch in stretches], np.int64),
        "seq_lens": lengths,
        "out_cache_loc": np.concatenate([stretch.slots for stretch in stretches]).astype(np.int64),
        "positions": np.concatenate([np.arange(*of) for of in zip(starts, lengths, strict=True)]),
        "extend_seq_lens": counts,
        "extend_prefix_lens": starts,
        "extend_start_loc": (np.cumsum(counts) - counts).astype(np.int32),
    }
    on_host = {
        "forward_mode": ForwardMode.EXTEND,
        "batch_size": len(stretches),
        "seq_lens_sum": int(lengths.sum()),
        "seq_lens_cpu": torch.from_numpy(lengths),
        "extend_num_tokens": int(counts.sum()),
        "extend_seq_lens_cpu": counts.tolist(),
        "extend_prefix_lens_cpu": starts.tolist(),
        "extend_logprob_start_lens_cpu": [0] * len(stretches),
    }
    return BatchFields(on_device, on_host)


class Piece(NamedTuple):
    """Slots to be written into a row, from a column on. slots: int32."""

    row: int
    column: int
    slots: np.ndarray


class TableChange(NamedTuple):
    """What one draft forward changes of the table.

    sources: int64, for each scratch row in use the row that it begins as.
    columns: number of columns that are copied from that row, 0 for none.
    cells: int64, places in the flat table that are written then.
    slots: int32, what is written there.
    """

    sources: np.ndarray
    columns: int
    cells: np.ndarray
    slots: np.ndarray

    @classmethod
    def of(
        cls, sources: Sequence[int], columns: int, pieces: Sequence[Piece], row_length: int
    ) -> TableChange:
        """Nothing is copied where `columns` is 0."""
        cells = [np.arange(len(slots)) + (row * row_length + column) for row, column, slots in pieces]
        return cls(
            np.array(sources, np.int64),
            columns,
            np.concatenate([np.empty(0, np.int64), *cells]),
            np.concatenate([np.empty(0, np.int32), *(piece.slots for piece in pieces)]),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """What `apply` needs on the device."""
        return {"table_sources": self.sources, "table_cells": self.cells, "table_slots": self.slots}

    def apply(self, table: torch.Tensor, arrays: Mapping[str, torch.Tensor]) -> None:
        """Writes the table: three kernels at most, none of which the host waits for."""
        if self.columns:
            copied = table[:, : self.columns].index_select(0, arrays["table_sources"])
            table[SCRATCH : SCRATCH + len(copied), : self.columns] = copied
        if len(self.cells):
            table.view(-1).index_copy_(0, arrays["table_cells"], arrays["table_slots"])


def on_device(arrays: Mapping[str, np.ndarray], device: torch.device | str) -> dict[str, torch.Tensor]:
    """The arrays on the device, with their types and shapes. One copy brings them all, and the host does not wait for it."""
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays.values()]
    begins = np.cumsum([0, *sizes]).tolist()
    packed = torch.empty(begins.pop(), dtype=torch.uint8, pin_memory=is_pin_memory_available(device))
    for begin, array in zip(begins, arrays.values(), strict=True):
        packed.numpy()[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
    moved = packed.to(device, non_blocking=True)
    return {
        name: moved[begin : begin + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for (name, array), begin in zip(arrays.items(), begins, strict=True)
    }
