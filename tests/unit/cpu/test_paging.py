"""Paged allocation in torch, as SGLang 0.5.17 needs it on a CPU: what the kernel's specification says, on SGLang's own allocator."""

import random

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402

from sglang_patches.host.versions.v0_5_17_cpu import decode_pages, extend_pages  # noqa: E402

PAGE, PAGES = 4, 12


@pytest.fixture
def allocator() -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(PAGE * PAGES, PAGE, torch.float32, "cpu", None, need_sort=True)


def _extend(allocator, requests: list[list[int]], counts: list[int]) -> bool:
    """Adds slots to each request; whether there were enough."""
    before = torch.tensor([len(slots) for slots in requests])
    after = before + torch.tensor(counts)
    last = torch.tensor([slots[-1] if slots else -1 for slots in requests])
    if counts == [1] * len(counts):
        found = decode_pages(None, allocator, after, after, last)
    else:
        found = extend_pages(None, allocator, before, before, after, after, last, sum(counts))
    if found is None:
        return False
    for slots, new in zip(requests, found.split(counts), strict=True):
        slots += new.tolist()
    return True


def _check(requests: list[list[int]]) -> None:
    pages = [slots[at] // PAGE for slots in requests for at in range(0, len(slots), PAGE)]
    assert len(set(pages)) == len(pages) and 0 not in pages  # page 0 is SGLang's
    for slots in requests:
        assert all(slot == slots[at - at % PAGE] + at % PAGE for at, slot in enumerate(slots))
        assert all(slot % PAGE == 0 for slot in slots[::PAGE])


@pytest.mark.parametrize("seed", range(20))
def test_requests_never_share_a_page_and_lie_in_order(allocator, seed):
    draw = random.Random(seed)
    requests: list[list[int]] = [[] for _ in range(3)]
    for _ in range(40):
        one = draw.random() < 0.5
        if not _extend(allocator, requests, [1 if one else draw.randint(1, 6) for _ in requests]):
            gone = draw.randrange(len(requests))
            allocator.free(torch.tensor(requests[gone]))
            requests[gone] = []
        _check(requests)
    used = sum(-(-len(slots) // PAGE) for slots in requests)
    assert allocator.available_size() == (PAGES - used) * PAGE


def test_a_full_cache_gives_nothing_and_keeps_what_it_has(allocator):
    requests: list[list[int]] = [[], []]
    assert _extend(allocator, requests, [PAGE * (PAGES - 1), PAGE])
    assert not _extend(allocator, requests, [1, 1])
    assert allocator.available_size() == 0
