"""Greedy output is plain decoding's, token for token: both schedulers, embedded and over gRPC, batches of 1 and 8."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.servers import ServerSpec, SglangServer, running

NEW_TOKENS = 32
WORKSHOP_PROMPTS = 60


@pytest.fixture(scope="module")
def ids(workshop_ids) -> list[list[int]]:
    return workshop_ids(WORKSHOP_PROMPTS)


@pytest.fixture(scope="module")
def expected(plain, ids) -> list[list[int]]:
    answers = plain.generate_many(ids, 8, temperature=0, max_new_tokens=NEW_TOKENS)
    return [answer["output_ids"] for answer in answers]


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
def test_greedy_output_is_plain_decodings(drafting, ids, expected, batch):
    if batch == 1:
        ids, expected = ids[::6], expected[::6]
    answers = drafting.generate_many(ids, batch, temperature=0, max_new_tokens=NEW_TOKENS)
    different = [i for i, answer in enumerate(answers) if answer["output_ids"] != expected[i]]
    assert different == []
    decoded = sum(len(answer["output_ids"]) - 1 for answer in answers)
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert decoded > 1.1 * steps, "no draft was accepted, equality would show nothing"
