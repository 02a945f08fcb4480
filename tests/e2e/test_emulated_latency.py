"""The benchmarks' emulated target latency slows a real target, in plain decoding and in SGLang's own drafting."""

from __future__ import annotations

import time

import pytest

from benchmarks.emulated_latency import emulated_latency
from tests.support.servers.engine import ServerSpec
from tests.support.servers.forked import running
from tests.support.tiny_model import texts_of, write_spelling_model

SECONDS, ANSWER = 0.05, 24


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_spelling_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("algorithm", [None, "STANDALONE"])
def test_every_step_of_a_server_takes_that_long(model, logs, algorithm):
    spec = ServerSpec(
        f"slow-{algorithm}",
        model,
        algorithm,
        dtype="float32",
        nodes=3,
        draft=None if algorithm is None else model,
        flags=("--context-length", "512"),
        environment=emulated_latency(1e3 * SECONDS),
        max_total_tokens=4096,
    )
    with running(spec, logs) as server:
        (prompt,) = texts_of(model, 1, 40)
        began = time.monotonic()
        answer = server.generate(prompt, temperature=0, max_new_tokens=ANSWER)
        took = time.monotonic() - began
        said = server.log.read_text()
    steps = answer["meta_info"].get("spec_verify_ct") or ANSWER - 1  # the prefill emits the first token
    assert len(answer["output_ids"]) == ANSWER
    assert took >= steps * SECONDS
    assert said.count("EMULATED latency: each decode or verify forward takes at least 50 ms") == 1
