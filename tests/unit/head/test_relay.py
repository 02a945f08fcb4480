"""Tokens that a step has brought and the scheduler has not handed out: those of the right requests, as many as are missing."""

import pytest
import torch

pytest.importorskip("sglang")

from sglang_patches.head.relay import TokenRelay  # noqa: E402
from tests.unit.accelerator.streams import Streams  # noqa: E402


def kept(relay, rows, tokens, counts):
    relay.keep(torch.tensor(rows), torch.tensor(tokens, dtype=torch.int32), torch.tensor(counts))


def test_the_last_tokens_of_each_request_are_told():
    relay = TokenRelay(8, 4, "cpu", None)
    kept(relay, [5, 2], [[1, 2, 3, 0], [7, 0, 0, 0]], [3, 1])
    assert relay.last([2, 5], [1, 2]) == [[7], [2, 3]]
    assert relay.last([5], [0]) == [[]]


def test_a_narrow_step_takes_the_place_of_a_wide_one():
    relay = TokenRelay(4, 4, "cpu", None)
    kept(relay, [1], [[1, 2, 3, 4]], [4])
    kept(relay, [1], [[9]], [1])
    assert relay.last([1], [1]) == [[9]]


def test_an_accelerator_s_tokens_are_read_behind_the_verification_and_beside_the_head():
    streams = Streams()
    relay = TokenRelay(4, 4, "cpu", streams)
    kept(relay, [1], [[5, 6]], [2])
    streams.log.append("the head's extension on forward")
    assert relay.last([1], [2]) == [[5, 6]]
    assert streams.log == [
        "event on forward",
        "the head's extension on forward",
        "side waits for the event on forward",
    ]


def test_nothing_is_read_where_the_scheduler_has_handed_out_all():
    streams = Streams()
    relay = TokenRelay(4, 4, "cpu", streams)
    kept(relay, [1], [[5, 6]], [2])
    assert relay.last([1], [0]) == [[]]
    assert streams.log == ["event on forward"]
