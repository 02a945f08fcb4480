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


def extend_fields(row: int, tokens: np.ndarray, start: int, slots: Sequence[int]) -> BatchFields:
    """One text's next tokens, after its first `start`."""
    count = len(tokens)
    lengths = np.array([start + count], np.int64)
    on_device = {
        "input_ids": tokens.astype(np.int64),
        "req_pool_indices": np.array([row], np.int64),
        "seq_lens": lengths,
        "out_cache_loc": np.array(slots, np.int64),
        "positions": np.arange(start, start + count),
        "extend_seq_lens": np.array([count], np.int32),
        "extend_prefix_lens": np.array([start], np.int32),
        "extend_start_loc": np.zeros(1, np.int32),
    }
    on_host = {
        "forward_mode": ForwardMode.EXTEND,
        "batch_size": 1,
        "seq_lens_sum": start + count,
        "seq_lens_cpu": torch.from_numpy(lengths),
        "extend_num_tokens": count,
        "extend_seq_lens_cpu": [count],
        "extend_prefix_lens_cpu": [start],
        "extend_logprob_start_lens_cpu": [0],
    }
    return BatchFields(on_device, on_host)
