"""The Triton kernels that give verified rows their KV slots and move accepted ones to the front, against NumPy."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.kernels.ops.speculative import cache_locs
from sglang.srt.speculative.spec_utils import move_accept_tokens_to_target_kvcache

from tests.unit.accelerator.interpreted.server import Server
from tests.unit.accelerator.trees import WIDTHS, forest, verification


def serve(width, **server):
    return Server(verification(forest(width, seed=width), width), **server)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_get_the_slots_after_the_cached_tokens(monkeypatch, width, page_size):
    monkeypatch.setattr(cache_locs, "_is_cuda", True)  # which of SGLang's implementations is called
    server = serve(width, page_size=page_size)
    v = server.verification
    lengths = torch.from_numpy(v.seq_lens)
    slots = cache_locs.assign_extend_cache_locs_func(
        req_pool_indices=server.rows,
        req_to_token=server.requests.req_to_token,
        start_offset=lengths,
        end_offset=lengths + width,
        batch_size=v.batch_size,
        draft_token_num=width,
        device="cpu",
    )
    assert slots.dtype == torch.int64
    assert slots.tolist() == server.write_slots().tolist()


def accepted_paths(v, rng):
    """[batch][accepted]: rows of a random path each, down to any depth; padding is never accepted."""
    paths = [
        [v.path(request, row) for row in range(v.width) if v.parents[request][row] is not None]
        for request in range(v.batch_size)
    ]
    return [choices[rng.integers(len(choices))] for choices in paths]


@pytest.mark.parametrize("server", [{}, {"page_size": 16}, {"mla": True}])
@pytest.mark.parametrize("width", [w for w in WIDTHS if w > 1])
def test_accepted_keys_and_values_move_to_the_front(width, server):
    server = serve(width, **server)
    v = server.verification
    buffers = server.kv.kv_buffer if server.mla else [*server.kv.k_buffer, *server.kv.v_buffer]
    expected = [buffer.numpy().copy() for buffer in buffers]
    paths = accepted_paths(v, np.random.default_rng(width))
    accept_index = torch.full((v.batch_size, width), -1, dtype=torch.int32)
    for request, path in enumerate(paths):
        accept_index[request, : len(path)] = torch.tensor(path) + request * width
        own = server.slots(request)[v.seq_lens[request] :]
        for before, after in zip([b.numpy() for b in buffers], expected, strict=True):
            after[own[: len(path)]] = before[own[path]]
    move_accept_tokens_to_target_kvcache(
        SimpleNamespace(seq_lens=torch.from_numpy(v.seq_lens), out_cache_loc=server.write_slots()),
        accept_index,
        torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32),
        server.allocator,
    )
    assert any(path != list(range(len(path))) for path in paths) or width == 2
    for buffer, after in zip(buffers, expected, strict=True):
        np.testing.assert_array_equal(buffer.numpy(), after)
