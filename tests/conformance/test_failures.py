"""The datastore killed, paused, slow or restarted and the draft side killed while a server generates: the same tokens, no
failed request, no further step that waits for what does not answer, and the datastore's drafts come back.

What the live tier drafts comes from the datastore: the client's own engine learns no answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.servers.forked import SglangServer, draft_processes
from tests.support.servers.metrics import metric
from tests.support.tiny_model import SPELLING_VOCABULARY
from tests.waiting import eventually

REQUESTS = 4
PROMPTS = [[3 + (i * 7 + j * j) % (SPELLING_VOCABULARY - 4) for j in range(12)] for i in range(REQUESTS)]
# The penalty keeps an answer from repeating itself.
WANTED = {"temperature": 0, "frequency_penalty": 0.5, "max_new_tokens": 400, "ignore_eos": True}
MISSES = 3  # steps in a row that wait in vain, after which a client asks no more
DELAY = 2.5  # seconds that a slow one takes, many times the deadline
RECOVERY_SECONDS = 60.0

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
    return server.generate_many(PROMPTS, REQUESTS, **WANTED)


def _from_live(answers: list[dict]) -> int:
    """Tokens that the live tier has proposed and the target accepted."""
    return sum(answer["meta_info"]["specstore"]["accepted"].get("live", 0) for answer in answers)


def _wait_for_datastore_drafts(server: SglangServer) -> None:
    eventually(
        lambda: _from_live(_generate(server)) > 0, "the datastore's drafts do not come", RECOVERY_SECONDS
    )


def _wait_until_it_is_not_asked(server: SglangServer) -> None:
    def is_not_asked() -> bool:
        _generate(server)
        return metric(server.url, "specstore_client_breaker_open") == 1

    eventually(is_not_asked, "the datastore is still asked", RECOVERY_SECONDS)


def _misses(server: SglangServer) -> float:
    """Steps that have waited in vain."""
    return metric(server.url, "specstore_client_failures_total")


@pytest.fixture
def most_misses(method) -> int:
    """Of a datastore that has gone: of the worker's client, and of the draft process's own."""
    return MISSES * (1 + method.draft_process)


def _disturbed(server: SglangServer, expected: list[list[int]], disturb: Callable[[], None]) -> float:
    """Misses before `disturb`, which happens when the first of several answers has begun."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        others = [pool.submit(server.generate, prompt, **WANTED) for prompt in PROMPTS[1:]]
        first = server.stream(PROMPTS[0], **WANTED)
        begun = next(first)
        assert len(begun["output_ids"]) < WANTED["max_new_tokens"], "it is over"
        disturb()
        misses = _misses(server)
        *_, last = first
        answers = [last, *(other.result() for other in others)]
    assert [answer["output_ids"] for answer in answers] == expected
    return misses


def test_drafts_come_from_the_datastore(drafting, expected):
    assert [answer["output_ids"] for answer in _generate(drafting)] == expected


def test_killed(drafting, datastore, expected, most_misses):
    try:
        before = _disturbed(drafting, expected, datastore.kill)
        _wait_until_it_is_not_asked(drafting)
        answers = _generate(drafting)
        assert [answer["output_ids"] for answer in answers] == expected
        assert _from_live(answers) == 0, "what is drafted without the datastore tells nothing of it"
        assert _misses(drafting) - before <= most_misses
    finally:
        datastore.start()
    _wait_for_datastore_drafts(drafting)


def test_paused(drafting, datastore, expected, most_misses):
    try:
        before = _disturbed(drafting, expected, datastore.pause)
        _wait_until_it_is_not_asked(drafting)
        assert [answer["output_ids"] for answer in _generate(drafting)] == expected
        assert _misses(drafting) - before <= most_misses
    finally:
        datastore.resume()
    _wait_for_datastore_drafts(drafting)


def test_slow(method, drafting, proxy, expected, most_misses):
    """It answers a probe from time to time, and the step after that is a miss."""

    def slow_down() -> None:
        proxy.delay = DELAY

    began = time.monotonic()
    try:
        before = _disturbed(drafting, expected, slow_down)
        _wait_until_it_is_not_asked(drafting)
        probes = (time.monotonic() - began) / (2 * DELAY) * (1 + method.draft_process)
        assert _misses(drafting) - before <= most_misses + probes
    finally:
        proxy.delay = 0.0
    _wait_for_datastore_drafts(drafting)


def test_restarted_mid_generation(drafting, datastore, expected):
    restarting = threading.Thread(target=datastore.start)

    def restart() -> None:
        datastore.kill()
        restarting.start()

    try:
        _disturbed(drafting, expected, restart)
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
    _disturbed(drafting, expected, kill)
    assert [answer["output_ids"] for answer in _generate(drafting)] == expected
