"""The datastore killed, paused, slow or restarted and the draft side killed while a server generates: the same tokens, no
failed request, no step held up beyond the deadline, and the datastore's drafts come back.

Answers that are known to the datastore tell its drafts from the local fallback's: with it a step accepts many tokens,
without it few, because a frequency penalty keeps the answers from repeating themselves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_patches.launch.metrics import metric
from tests.conformance.conftest import DEADLINE_MS
from tests.support.servers import SglangServer, draft_processes
from tests.support.tiny_model import SPELLING_VOCABULARY
from tests.waiting import eventually

NEW_TOKENS = 400
REQUESTS = 4
SLACK_BUCKET = 1.0  # the histogram bucket that a step of at most the deadline falls into
PROMPTS = [[3 + (i * 7 + j * j) % (SPELLING_VOCABULARY - 4) for j in range(12)] for i in range(REQUESTS)]
MANY = 3.0  # tokens a step: only the datastore knows them
RECOVERY_SECONDS = 180.0
GENERATIONS = 20
STEPS = "specstore_client_step_seconds"

pytestmark = pytest.mark.parametrize("server", ["overlap, gRPC"], indirect=True)


@pytest.fixture(scope="module")
def expected(plain) -> list[list[int]]:
    """Plain decoding's answers."""
    return [answer["output_ids"] for answer in _generate(plain)]


@pytest.fixture
def drafting(server, proxy) -> SglangServer:
    """The server, known to draft from the datastore."""
    proxy.delay = 0.0
    _wait_for_datastore_drafts(server)
    return server


def _generate(server: SglangServer) -> list[dict]:
    sampling = {"temperature": 0, "frequency_penalty": 0.5, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return server.generate_many(PROMPTS, REQUESTS, **sampling)


def _tokens_per_step(answers: list[dict]) -> float:
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    return sum(len(answer["output_ids"]) - 1 for answer in answers) / steps


def _wait_for_datastore_drafts(server: SglangServer) -> list[dict]:
    """The answers of a generation that had them."""
    limit = time.monotonic() + RECOVERY_SECONDS
    while _tokens_per_step(answers := _generate(server)) <= MANY:
        assert time.monotonic() < limit, "the datastore's drafts did not come back"
    return answers


def _client_failures(server: SglangServer) -> float:
    return metric(server.url, "specstore_client_failures_total")


def _late_steps(server: SglangServer) -> float:
    return metric(server.url, STEPS + "_count") - metric(server.url, STEPS + "_bucket", le=str(SLACK_BUCKET))


def _during_generation(server: SglangServer, disturb: Callable[[], None]) -> list[dict]:
    """The answers of a generation that `disturb` happens in the middle of. One that is over before is made again: a step may take
    less time than a metric's scrape on a busy machine."""
    for _ in range(GENERATIONS):
        before = metric(server.url, STEPS + "_count")
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(_generate, server)
            while metric(server.url, STEPS + "_count") < before + 5 and not answers.done():
                time.sleep(0.01)
            if not answers.done():
                disturb()
                return answers.result()
    pytest.fail("every generation ended before the disturbance")


def _assert_undisturbed(server: SglangServer, expected: list[list[int]], disturb: Callable[[], None]) -> None:
    late = _late_steps(server)
    answers = _during_generation(server, disturb)
    assert [answer["output_ids"] for answer in answers] == expected
    # A step that the machine itself suspended (both cores busy elsewhere) may be late; a waiting one would recur.
    assert _late_steps(server) - late <= 2


def _wait_for_a_failure(server: SglangServer, before: float) -> None:
    """A disturbance may come after a generation's last step."""
    limit = time.monotonic() + RECOVERY_SECONDS
    while _client_failures(server) <= before:
        assert time.monotonic() < limit, "no step was missed"
        _generate(server)


def test_drafts_come_from_the_datastore(drafting, expected):
    answers = _wait_for_datastore_drafts(drafting)
    assert [answer["output_ids"] for answer in answers] == expected


def test_killed(drafting, datastore, expected):
    failures = _client_failures(drafting)
    try:
        _assert_undisturbed(drafting, expected, datastore.kill)
        answers = _generate(drafting)
        assert [answer["output_ids"] for answer in answers] == expected
        assert _tokens_per_step(answers) < MANY, "what is drafted without the datastore tells nothing of it"
        assert _client_failures(drafting) > failures
    finally:
        datastore.start()
    _wait_for_datastore_drafts(drafting)


def test_paused(drafting, datastore, expected):
    failures = _client_failures(drafting)
    try:
        _assert_undisturbed(drafting, expected, datastore.pause)
        _wait_for_a_failure(drafting, failures)
    finally:
        datastore.resume()
    _wait_for_datastore_drafts(drafting)


def test_slow(drafting, proxy, expected):
    failures = _client_failures(drafting)

    def slow_down() -> None:
        proxy.delay = 5 * DEADLINE_MS / 1e3

    try:
        _assert_undisturbed(drafting, expected, slow_down)
        _wait_for_a_failure(drafting, failures)
    finally:
        proxy.delay = 0.0
    _wait_for_datastore_drafts(drafting)


def test_restarted_mid_generation(drafting, datastore, expected):
    restarting = threading.Thread(target=datastore.start)

    def restart() -> None:
        datastore.kill()
        restarting.start()

    try:
        _assert_undisturbed(drafting, expected, restart)
    finally:
        restarting.join()
    _wait_for_datastore_drafts(drafting)


@pytest.mark.draft_process
def test_draft_side_killed(drafting, expected):
    def kill() -> None:
        draft_processes(drafting)[0].kill()

    def is_up() -> bool:
        return metric(drafting.url, "specstore_draft_up") == 1

    eventually(is_up, "the test before has lost it", RECOVERY_SECONDS)
    _assert_undisturbed(drafting, expected, kill)
    assert [answer["output_ids"] for answer in _generate(drafting)] == expected
