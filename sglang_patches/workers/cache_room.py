"""Room for trees in a request's row of KV slots.

SGLang reserves twice a step's slots for every running request, for overlap scheduling runs one step ahead of what it knows.
With page size 1 its rows are not that much longer than the context, so that a request close to the limit runs over its own
row: an IndexError on a CPU, slots of the next request on a GPU. Rows are made as long as what is reserved.
"""

from __future__ import annotations

from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size, get_alloc_reserve_per_decode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_patches import hooks


def _at_least_what_is_reserved(extra: int) -> int:
    """extra: tokens of a row beyond the context's length. The reserve ends on a page boundary."""
    return max(extra, get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)


HOOKS = {
    "sglang.srt.mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len": _at_least_what_is_reserved
}


def make_room_for_trees() -> None:
    """Before the pools are allocated; for the scheduler's process alone, as `endings.tell_worker_of_all_ends`."""
    hooks.register(HOOKS, HookType.AFTER)
    hooks.refuse_if_left_out()
    HookRegistry.apply_hooks()
