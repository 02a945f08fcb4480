"""What a draft forward gives SGLang, as `ForwardBatch.init_new` would: the tensors that its backends take on the device, and those that
they take on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode


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
