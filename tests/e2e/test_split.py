"""Prefill and decode on instances of their own, behind SGLang's router: one prefill instance, two decode instances, of
which the second retracts its requests again and again.

Everything here is real: KV moves over TCP with Mooncake, prompts are prefilled in chunks and hit the radix cache.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import pytest
import requests

from tests.e2e import clients
from tests.e2e.conftest import WORKSHOP_TOKENS as NEW_TOKENS
from tests.e2e.services import DatastoreService, serving
from tests.support.servers import metrics
from tests.support.servers.engine import Endpoint, ServerSpec
from tests.support.servers.forked import SglangServer, Split, running_split
from tests.waiting import eventually

PROMPTS, LONG_PROMPTS = 10, 40
CHUNK = 128  # tokens of a prefill step; most prompts take several
# Longer than a prompt takes from its first chunk to its first decode step, however busy the machine: its session ends then.
GRACE = 60.0
SECONDS = 180.0
# A request whose instance has died is told so in time, or answered by another (docs/disaggregation.md). HUNG: neither.
TOLD = 10.0
HUNG = 90.0
SESSION_HEADER = "X-Request-Id-Session"  # the router passes on what begins so
WORKING = 10.0  # after it is ready again an instance has worked


@pytest.fixture(scope="module")
def datastore(logs) -> Iterator[DatastoreService]:
    with serving(logs / "split-datastore.log", None, "--grace", str(GRACE)) as service:
        yield service


@pytest.fixture(scope="module")
def stack(demo_model, datastore, logs) -> Iterator[Split]:
    # The longest deadline there is: a busy machine misses none, and what nobody answers is missed all the same.
    flags = ("--specstore-endpoint", datastore.endpoint, "--specstore-deadline-ms", "10000")
    flags += ("--specstore-length", "static", "--chunked-prefill-size", str(CHUNK), "--enable-metrics")
    flags += ("--specstore-request-conversation", f"agents,header:{SESSION_HEADER}")
    # Three of them and `plain` are in memory at once.
    sizes = {"dtype": "float32", "max_total_tokens": 16384}
    spec = ServerSpec("split", demo_model, "SSSD", flags=flags, **sizes)
    retracts = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
    with running_split(spec, logs, decodes=2, of_the_last=retracts) as stack:
        yield stack


@pytest.fixture(scope="module")
def ids(workshop_ids, pytestconfig) -> list[list[int]]:
    return workshop_ids[: LONG_PROMPTS if pytestconfig.getoption("--long") else PROMPTS]


@pytest.fixture(scope="module")
def expected(plain_answers, ids) -> list[list[int]]:
    return plain_answers[: len(ids)]


def metric(server: SglangServer, name: str, **labels: str) -> float:
    """The sum of its samples with these labels."""
    return metrics.metric(server.url, name, **labels)


def takeovers(stack: Split, **labels: str) -> float:
    return sum(metric(server, "specstore_client_takeovers_total", **labels) for server in stack.decodes)


@pytest.fixture(scope="module")
def answers(stack, ids) -> list[dict]:
    """What the split answers, four requests at a time."""
    return stack.generate_many(ids, 4, temperature=0, max_new_tokens=NEW_TOKENS)


def test_greedy_output_is_plain_decodings(answers, expected, datastore):
    assert [i for i, answer in enumerate(answers) if answer["output_ids"] != expected[i]] == []
    decoded = sum(len(answer["output_ids"]) - 1 for answer in answers)
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert decoded > 1.1 * steps, "no draft was accepted, equality would show nothing"
    eventually(lambda: datastore.sessions() == 0, "sessions are left", SECONDS)


def test_greedy_output_one_by_one_is_plain_decodings(stack, ids, expected):
    answers = stack.generate_many(ids[::4], 1, temperature=0, max_new_tokens=NEW_TOKENS)
    assert [answer["output_ids"] for answer in answers] == expected[::4]


def test_streamed_output_is_plain_decodings(stack, ids, expected):
    def streamed(row: list[int]) -> list[int]:
        *_, last = stack.stream(row, temperature=0, max_new_tokens=NEW_TOKENS)
        return last["output_ids"]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(streamed, ids)) == expected


def test_requests_were_retracted_meanwhile(stack, ids, expected, answers):
    """Or are now: it takes two on that instance at a time, and so they are asked for at once."""
    sampling = {"temperature": 0, "max_new_tokens": 4 * NEW_TOKENS, "ignore_eos": True}
    found = [answer["output_ids"] for answer in stack.generate_at(1, ids[:4], **sampling)]
    assert [answer[: len(row)] for answer, row in zip(found, expected, strict=False)] == expected[:4]
    retracted = metric(stack.decodes[1], "sglang:num_retracted_requests_total")
    assert retracted > 0, "no request was retracted: this shows nothing"


def test_sessions_are_open_before_the_first_decode_step(stack, answers):
    counted = {session: takeovers(stack, session=session) for session in ("held", "missing", "unanswered")}
    assert sum(counted.values()) >= len(answers)
    assert counted["held"] >= 0.99 * sum(counted.values()), counted


def test_the_first_step_drafts_from_the_prompt(stack, plain, datastore):
    """A prompt that repeats itself: three tokens need one step after the prefill's if it drafts."""
    datastore.flush()
    ids = [2000 + i % 11 for i in range(150)]
    sampling = {"temperature": 0, "max_new_tokens": 3}
    answer = plain.generate(ids, **sampling)["output_ids"]
    assert answer == ids[7:10], "the model does not go on with the repetition, another prompt is needed"
    split_answer = stack.generate(ids, **sampling)
    assert split_answer["output_ids"] == answer
    assert split_answer["meta_info"]["spec_verify_ct"] == 1


def steps_of(answer: dict) -> int:
    return answer["meta_info"]["spec_verify_ct"]


def test_what_one_decode_instance_publishes_the_other_proposes(stack, datastore, ids):
    datastore.flush()

    def ask(decode: int, publish: bool) -> dict:
        wishes = {"specstore": {"publish": publish}}
        return stack.generate_at(decode, ids[0], temperature=0, max_new_tokens=48, custom_params=wishes)

    first = ask(0, publish=True)
    eventually(lambda: datastore.sessions() == 0, "the first request's session is left", SECONDS)
    second = ask(1, publish=False)
    assert second["output_ids"] == first["output_ids"]
    assert steps_of(second) < steps_of(first) / 2


def test_a_conversation_finds_its_history_on_any_decode_instance(stack, datastore, ids):
    datastore.flush()

    def ask(decode: int, conversation: str) -> dict:
        wishes = {"specstore": {"conversation": conversation, "publish": False}}
        return stack.generate_at(decode, ids[1], temperature=0, max_new_tokens=48, custom_params=wishes)

    first = ask(0, "a")
    eventually(lambda: datastore.sessions() == 0, "the first request's session is left", SECONDS)
    again, other = ask(1, "a"), ask(1, "b")
    assert first["output_ids"] == again["output_ids"] == other["output_ids"]
    assert steps_of(again) < min(steps_of(first), steps_of(other)) / 2


# How clients may name a session behind the router: with these fields of a body, or as a gateway before it does.
NAMING: dict[str, Callable[[Split, str], str]] = {
    "OpenAI's prompt_cache_key": lambda stack, name: clients.openai_chat(stack, name, {}),
    "SGLang's conversation_id": lambda stack, name: clients.sglang(stack, name, {}),
    "a gateway's header": lambda stack, name: clients.openai_chat(stack, "", {SESSION_HEADER: name}),
}


@pytest.mark.parametrize("naming", NAMING)
def test_a_session_named_before_the_router_is_a_conversation(stack, datastore, naming, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def accepted(session: str) -> tuple[str, float]:
        """The answer, and how many of its tokens were drafted by what is not the live tier."""
        datastore.flush()
        count = lambda: sum(metric(server, "specstore_accepted_nodes_total") for server in stack.decodes)  # noqa: E731
        before = count()
        answer = NAMING[naming](stack, session)
        eventually(lambda: datastore.sessions() == 0, "the request's session is left", SECONDS)
        return answer, count() - before

    asked = [accepted(name) for name in (naming, naming, f"not {naming}")]
    (answer,) = {answer for answer, _ in asked}
    first, again, other = (count for _, count in asked)
    assert answer and again >= clients.TOKENS / 2 > 2 * max(first, other)


def test_aborted_requests_leave_nothing(stack, datastore, ids, expected):
    """Aborted by going away: while they wait, while they are prefilled, while they are decoded."""

    def leave(after: float) -> None:
        body = {
            "input_ids": ids[2],
            "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True},
            "stream": True,
        }
        with requests.post(stack.url + "/generate", json=body, stream=True, timeout=SECONDS):
            time.sleep(after)

    threads = [threading.Thread(target=leave, args=(0.15 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    answers = stack.generate_many(ids[:4], 4, temperature=0, max_new_tokens=NEW_TOKENS)
    for thread in threads:
        thread.join()
    assert [answer["output_ids"] for answer in answers] == expected[:4]
    eventually(lambda: datastore.sessions() == 0, "sessions are left", SECONDS)
    eventually(lambda: all(idle(server) for server in stack.instances), "requests are left", SECONDS)


def idle(server: SglangServer) -> bool:
    """Whether it runs and holds nothing."""
    return metric(server, "sglang:num_running_reqs") == 0 and metric(server, "sglang:num_used_tokens") == 0


def test_a_sampled_request_works(stack, ids):
    answer = stack.generate(ids[3], temperature=0.8, top_p=0.9, max_new_tokens=NEW_TOKENS)
    assert len(answer["output_ids"]) > 1


def test_a_constrained_request_is_plain_decodings(stack, plain, ids):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    sampling = {"temperature": 0, "max_new_tokens": 24, "json_schema": json.dumps(schema)}
    text = stack.generate(ids[4], **sampling)["text"]
    assert text.startswith("{") and text == plain.generate(ids[4], **sampling)["text"]


@dataclass(frozen=True)
class Outcome:
    """Of a request through the router: its answer, or what its client was told."""

    prompt: int
    sent: float
    ended: float
    answer: list[int] | None = None
    error: Exception | None = None

    @property
    def hung(self) -> bool:
        """Its client has given up."""
        return isinstance(self.error, requests.Timeout)

    def told_after(self, moment: float) -> float:
        """Seconds from when it could have been told."""
        return self.ended - max(self.sent, moment)


class Load:
    """Requests through the router, four at a time, every other one streamed, until it is stopped."""

    def __init__(self, stack: Split, ids: list[list[int]]) -> None:
        self.outcomes: list[Outcome] = []
        self._router, self._ids = Endpoint(stack.url, timeout=HUNG), ids
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(i,)) for i in range(4)]

    def _work(self, number: int) -> None:
        while not self._stopping.is_set():
            number = (number + 5) % len(self._ids)
            sent = time.monotonic()
            try:
                answer = self._ask(number)
                self.outcomes.append(Outcome(number, sent, time.monotonic(), answer=answer))
            except Exception as error:
                self.outcomes.append(Outcome(number, sent, time.monotonic(), error=error))
                self._stopping.wait(0.5)

    def _ask(self, number: int) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
        if number % 2:
            *_, last = self._router.stream(self._ids[number], **sampling)
            return last["output_ids"]
        return self._router.generate(self._ids[number], **sampling)["output_ids"]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, answers: int, failures: int | None = None) -> None:
        """Until so many more have been answered, or so many in all have failed."""
        enough = self.answered() + answers

        def reached() -> bool:
            failed = len(self.outcomes) - self.answered()
            return self.answered() >= enough or (failures is not None and failed >= failures)

        eventually(reached, "answers are missing", SECONDS)

    def answered(self) -> int:
        return sum(outcome.answer is not None for outcome in list(self.outcomes))


def kill_scheduler(server: SglangServer) -> None:
    """SGLang's own process that answers HTTP notices and ends itself, some seconds later."""
    processes = psutil.Process(server.pid).children(recursive=True)
    next(process for process in processes if "scheduler" in process.name()).kill()


@pytest.mark.clock
@pytest.mark.timeout(1800)
def test_each_process_killed_in_turn_under_load(stack, datastore, ids, expected):
    """A request ends right or with an error of its own, none hangs; the others go on; nothing is left. Last: it stops
    instances."""
    (prefill,), (first, second) = stack.prefills, stack.decodes

    def killed(kill: Callable[[], None]) -> list[Outcome]:
        """Kills under load and waits until eight requests are answered after it, or four clients have been told of a
        failure; those that failed."""
        with Load(stack, ids) as load:
            load.wait_for(6)
            kill()
            moment = time.monotonic()
            load.wait_for(8, failures=4)
        assert sum(outcome.hung for outcome in load.outcomes) == 0
        assert [o.prompt for o in load.outcomes if o.answer not in (None, expected[o.prompt])] == []
        failed = [outcome for outcome in load.outcomes if outcome.error is not None]
        assert [
            outcome for outcome in failed if not isinstance(outcome.error, requests.RequestException)
        ] == []
        assert [outcome for outcome in failed if outcome.told_after(moment) > TOLD] == []
        return failed

    def answers_again(*restarted: SglangServer) -> None:
        """Requests, some of them by the decode instances that have just been started: they take turns."""
        with Load(stack, ids) as load:  # the router looks at its instances every second
            eventually(lambda: all(steps(server) > 0 for server in restarted), "it has no work", WORKING)
            load.wait_for(1)
        with Load(stack, ids) as load:
            load.wait_for(12)
        assert [o for o in load.outcomes if o.answer != expected[o.prompt]] == []

    def rest(*servers: SglangServer) -> None:
        eventually(lambda: datastore.sessions() == 0, "sessions are left", SECONDS)
        eventually(lambda: all(idle(server) for server in servers), "requests are left", SECONDS)

    assert killed(datastore.kill) == []
    datastore.start()
    with Load(stack, ids):
        eventually(
            lambda: all(metric(s, "specstore_client_breaker_open") == 0 for s in stack.decodes),
            "a breaker is open",
            SECONDS,
        )
    rest(*stack.instances)

    assert killed(stack.router.kill) != []
    stack.start_router()
    stack.wait_until_routed()
    answers_again()
    rest(*stack.instances)

    killed(second.kill)  # the first goes on alone: all that can fail is what the second had begun to stream
    rest(prefill, first)

    assert killed(prefill.kill) != []
    for server in (second, prefill):
        server.start()
    for server in (second, prefill):
        server.wait_until_healthy()
    answers_again(second)
    rest(*stack.instances)

    killed(lambda: kill_scheduler(first))  # the second, started again, goes on alone
    rest(prefill, second)


def steps(decode: SglangServer) -> float:
    """First steps of requests that another instance has prefilled."""
    return metric(decode, "specstore_client_takeovers_total")
