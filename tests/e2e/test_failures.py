"""The datastore killed, paused, slow or restarted while a server generates: the same tokens, no failed request, no step
held up beyond the deadline, and the datastore's drafts come back.

A prior made of plain decoding's own answers tells the datastore's drafts from the local fallback's: with it a step
accepts many tokens, without it few, because a frequency penalty keeps the answers from repeating themselves.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_patches.launch.metrics import metric
from sglang_patches.launch.servers import ServerSpec
from tests.e2e.services import SlowProxy, serving
from tests.support.servers import SglangServer, running

NEW_TOKENS = 1200
REQUESTS = 4
DEADLINE_MS = 20.0
SLACK_BUCKET = 0.05  # the histogram bucket that a step of at most the deadline certainly falls into
PROMPTS = [[3 + (i * 7 + j * j) % 20 for j in range(12)] for i in range(REQUESTS)]
RECOVERY_SECONDS = 30.0


@pytest.fixture(scope="module")
def expected(tiny_plain) -> list[list[int]]:
    """Plain decoding's answers."""
    return [answer["output_ids"] for answer in _generate(tiny_plain)]


@pytest.fixture(scope="module")
def prior(expected, tiny_model, tmp_path_factory):
    """The answers as a prior, so that a reachable datastore drafts them."""
    folder = tmp_path_factory.mktemp("prior")
    source = folder / "answers.jsonl"
    source.write_text(
        "".join(json.dumps({"tokens": p + a}) + "\n" for p, a in zip(PROMPTS, expected, strict=True))
    )
    out = folder / "prior"
    command = [sys.executable, "-m", "datastore_service.cli.main", "build", str(source), "--out", str(out)]
    subprocess.run([*command, "--tokenizer", str(tiny_model), "--field", "tokens"], check=True)
    return out


@pytest.fixture
def datastore(prior, logs):
    with serving(logs / "failures-datastore.log", prior) as service:
        yield service


@pytest.fixture(scope="module")
def proxy_and_server(prior, tiny_model, logs):
    """One server for all failures, behind a proxy whose target changes with each test's datastore."""
    proxy = SlowProxy()
    flags = (
        "--specstore-endpoint",
        proxy.endpoint,
        "--specstore-deadline-ms",
        str(DEADLINE_MS),
        "--enable-metrics",
    )
    spec = ServerSpec("failures-sssd", tiny_model, "SSSD", dtype="float32", flags=flags)
    try:
        with running(spec, logs) as server:
            yield proxy, server
    finally:
        proxy.close()


@pytest.fixture
def server(proxy_and_server, datastore) -> SglangServer:
    """The server, known to draft from this test's datastore."""
    proxy, server = proxy_and_server
    proxy.redirect(datastore.port)
    _wait_for_datastore_drafts(server)
    return server


def _generate(server: SglangServer) -> list[dict]:
    sampling = {"temperature": 0, "frequency_penalty": 0.5, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return server.generate_many(PROMPTS, REQUESTS, **sampling)


def _tokens_per_step(answers: list[dict]) -> float:
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    return sum(len(answer["output_ids"]) - 1 for answer in answers) / steps


def _client_failures(server: SglangServer) -> float:
    return _samples(server, "specstore_client_failures_total")


def _samples(server: SglangServer, name: str, **labels: str) -> float:
    return metric(server.url, name, **labels)


def _steps_beyond_the_deadline(server: SglangServer) -> float:
    name = "specstore_client_step_seconds"
    return _samples(server, name + "_count") - _samples(server, name + "_bucket", le=str(SLACK_BUCKET))


def _wait_for_datastore_drafts(server: SglangServer) -> None:
    limit = time.monotonic() + RECOVERY_SECONDS
    while _tokens_per_step(_generate(server)) < 4:
        assert time.monotonic() < limit, "the datastore's drafts did not come back"


def _during_generation(server: SglangServer, disturb) -> list[dict]:
    """The answers of a generation that `disturb` happens in the middle of."""
    before = _samples(server, "specstore_client_step_seconds_count")
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(_generate, server)
        while _samples(server, "specstore_client_step_seconds_count") < before + 5 and not answers.done():
            time.sleep(0.01)
        assert not answers.done(), "the generation ended before the disturbance"
        disturb()
        return answers.result()


def _assert_undisturbed(
    server: SglangServer, answers: list[dict], expected: list[list[int]], late_before: float
) -> None:
    assert [answer["output_ids"] for answer in answers] == expected
    # A step that the machine itself suspended (both cores busy elsewhere) may be late; a waiting one would recur.
    assert _steps_beyond_the_deadline(server) - late_before <= 2


def test_drafts_come_from_the_datastore(server, expected):
    answers = _generate(server)
    assert [answer["output_ids"] for answer in answers] == expected
    assert _tokens_per_step(answers) > 4


def test_killed(server, datastore, expected):
    failures, late = _client_failures(server), _steps_beyond_the_deadline(server)
    answers = _during_generation(server, datastore.kill)
    _assert_undisturbed(server, answers, expected, late)
    assert _client_failures(server) > failures
    datastore.start()
    _wait_for_datastore_drafts(server)


def test_paused(server, datastore, expected):
    failures, late = _client_failures(server), _steps_beyond_the_deadline(server)
    answers = _during_generation(server, datastore.pause)
    _assert_undisturbed(server, answers, expected, late)
    assert _client_failures(server) > failures
    datastore.resume()
    _wait_for_datastore_drafts(server)


def test_slow(server, proxy_and_server, expected):
    proxy, _ = proxy_and_server
    failures, late = _client_failures(server), _steps_beyond_the_deadline(server)

    def slow_down() -> None:
        proxy.delay = 5 * DEADLINE_MS / 1e3

    answers = _during_generation(server, slow_down)
    _assert_undisturbed(server, answers, expected, late)
    assert _client_failures(server) > failures
    proxy.delay = 0.0
    _wait_for_datastore_drafts(server)


def test_restarted_mid_generation(server, datastore, expected):
    late = _steps_beyond_the_deadline(server)

    def restart() -> None:
        datastore.kill()
        threading.Thread(target=datastore.start).start()

    answers = _during_generation(server, restart)
    _assert_undisturbed(server, answers, expected, late)
    _wait_for_datastore_drafts(server)
