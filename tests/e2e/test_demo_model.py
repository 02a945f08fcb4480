"""Greedy output of every method is plain decoding's on a model that writes text: a slice of the prompts, embedded and
synchronous; `--long` runs all of them, over gRPC and with overlap too, and one by one.

Everything else is checked on a tiny model: tests/conformance. gRPC with overlap runs in test_split.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_patches.methods.registry import METHODS
from tests.e2e.conftest import WORKSHOP_TOKENS
from tests.support.servers.engine import ServerSpec
from tests.support.servers.forked import SglangServer, running
from tests.support.tiny_exits import train_poor_exits

SLICE = 10


@pytest.fixture(
    scope="module", params=["synchronous, embedded", pytest.param("overlap, gRPC", marks=pytest.mark.long)]
)
def setup(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def poor_exits(demo_model, tmp_path_factory) -> Callable[[], Path]:
    """File of the demo model's early exits, made when it is first asked for."""
    return functools.cache(
        lambda: train_poor_exits(demo_model, tmp_path_factory.mktemp("exits") / "exits.safetensors")
    )


@pytest.fixture(scope="module", params=METHODS)
def drafting(request, setup, demo_model, datastore_endpoint, logs, poor_exits) -> Iterator[SglangServer]:
    scheduling, place = setup.split(", ")
    endpoint = "embedded" if place == "embedded" else datastore_endpoint
    flags = ("--specstore-endpoint", endpoint, "--specstore-deadline-ms", "200")
    if METHODS[request.param].early_exit:
        flags += ("--specstore-early-exit", str(poor_exits()))
    spec = ServerSpec(
        f"demo-{request.param}-{place}",
        demo_model,
        request.param,
        dtype="float32",
        draft=demo_model if METHODS[request.param].draft_process else None,
        flags=(*flags, "--specstore-length", "static"),
        overlap=scheduling == "overlap",
    )
    with running(spec, logs) as server:
        yield server


def _assert_plain_decodings(drafting: SglangServer, ids, expected, batch: int) -> None:
    answers = drafting.generate_many(ids, batch, temperature=0, max_new_tokens=WORKSHOP_TOKENS)
    assert [i for i, answer in enumerate(answers) if answer["output_ids"] != expected[i]] == []
    decoded = sum(len(answer["output_ids"]) - 1 for answer in answers)
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert decoded > 1.1 * steps, "no draft was accepted, equality would show nothing"


def test_greedy_output_is_plain_decodings(drafting, workshop_ids, plain_answers):
    _assert_plain_decodings(drafting, workshop_ids[:SLICE], plain_answers[:SLICE], 8)


@pytest.mark.long
@pytest.mark.parametrize("batch", [1, 8])
def test_greedy_output_of_all_prompts_is_plain_decodings(drafting, workshop_ids, plain_answers, batch):
    _assert_plain_decodings(drafting, workshop_ids, plain_answers, batch)
