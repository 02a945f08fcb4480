"""Rows of KV slots hold everything SGLang may reserve for a request, at every width and page size: SGLang's own sizing."""

import pytest

pytest.importorskip("sglang")

from sglang.srt.mem_cache.allocation_sizing import (  # noqa: E402
    get_alloc_reserve_per_decode,
    get_req_to_token_extra_context_len,
    page_aligned_decode_alloc_lens,
)
from sglang.srt.runtime_context import SpawnRanks, get_context, publish, reset_context  # noqa: E402

from sglang_patches.start.room import _at_least_what_is_reserved, check_room  # noqa: E402
from sglang_patches.start.tree_attention import BRANCHES  # noqa: E402
from tests.unit.plugin.resolution import server_args  # noqa: E402

CONTEXT = 300


class Kv:
    def __init__(self, committed):
        self.kv_committed_len, self.kv_allocated_len = committed, 0


class Request:
    def __init__(self, committed):
        self.kv = Kv(committed)


@pytest.fixture
def published(plugin, model_path, monkeypatch):
    monkeypatch.setenv("SPECSTORE_NODES", "1")  # the narrowest: what a test sets may be wider, never narrower
    publish(
        server_args(model_path("dense"), "ampere"), role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0)
    )
    yield get_context()
    reset_context()


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_longest_request_fits_into_its_row(published, page_size):
    for width in range(2, 65):
        published.override(
            "test",
            page_size=page_size,
            speculative_num_draft_tokens=width,
            speculative_num_steps=max(1, width // BRANCHES),
        )
        stock = get_req_to_token_extra_context_len()
        longest = [Request(committed) for committed in range(CONTEXT)]
        _, ends, _ = page_aligned_decode_alloc_lens(
            longest, reserve=get_alloc_reserve_per_decode(), page_size=page_size
        )
        assert max(ends) <= CONTEXT + _at_least_what_is_reserved(stock)
        check_room(CONTEXT + _at_least_what_is_reserved(stock), CONTEXT)
        # SGLang's own rows are too short where its pages are single tokens: the reason for ours.
        assert (max(ends) > CONTEXT + stock) == (page_size == 1 and width > 5)
        if max(ends) > CONTEXT + stock:
            with pytest.raises(RuntimeError, match="context limit"):
                check_room(CONTEXT + stock, CONTEXT)
