"""Greedy output is plain decoding's, token for token: both schedulers, embedded and over gRPC, batches of 1 and 8."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_patches.launch.servers import ServerSpec
from tests.e2e.conftest import WORKSHOP_TOKENS
from tests.support.servers import SglangServer, running


# Each place and each scheduling once; a server's start is what these tests take. gRPC with overlap: test_split.
@pytest.fixture(scope="module", params=["embedded-overlap", "grpc-synchronous"])
def drafting(request, demo_model, datastore_endpoint, logs) -> Iterator[SglangServer]:
    place, scheduling = request.param.split("-")
    endpoint = "embedded" if place == "embedded" else datastore_endpoint
    flags = (
        "--specstore-endpoint",
        endpoint,
        "--specstore-deadline-ms",
        "200",
        "--specstore-length",
        "static",
    )
    spec = ServerSpec(
        request.param, demo_model, "SSSD", dtype="float32", flags=flags, overlap=scheduling == "overlap"
    )
    with running(spec, logs) as server:
        yield server


@pytest.mark.parametrize("batch", [1, 8])
def test_greedy_output_is_plain_decodings(drafting, workshop_ids, plain_answers, batch):
    every = 6 if batch == 1 else 1
    ids, expected = workshop_ids[::every], plain_answers[::every]
    answers = drafting.generate_many(ids, batch, temperature=0, max_new_tokens=WORKSHOP_TOKENS)
    different = [i for i, answer in enumerate(answers) if answer["output_ids"] != expected[i]]
    assert different == []
    decoded = sum(len(answer["output_ids"]) - 1 for answer in answers)
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert decoded > 1.1 * steps, "no draft was accepted, equality would show nothing"
