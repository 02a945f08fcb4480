"""Tokens that a step has brought and the scheduler has not handed out: those of the right requests, as many as are missing."""

import pytest
import torch

pytest.importorskip("sglang")

from sglang_patches.head.relay import TokenRelay  # noqa: E402


def kept(relay, rows, tokens, counts):
    relay.keep(torch.tensor(rows), torch.tensor(tokens, dtype=torch.int32), torch.tensor(counts))


def test_the_last_tokens_of_each_request_are_told():
    relay = TokenRelay(8, 4, "cpu")
    kept(relay, [5, 2], [[1, 2, 3, 0], [7, 0, 0, 0]], [3, 1])
    assert relay.last([2, 5], [1, 2]) == [[7], [2, 3]]
    assert relay.last([5], [0]) == [[]]


def test_a_narrow_step_takes_the_place_of_a_wide_one():
    relay = TokenRelay(4, 4, "cpu")
    kept(relay, [1], [[1, 2, 3, 4]], [4])
    kept(relay, [1], [[9]], [1])
    assert relay.last([1], [1]) == [[9]]
