"""ResilientDatastore over a primary whose behaviour the test chooses."""

import time
from dataclasses import replace

import numpy as np
import pytest

from datastore_service.client import metrics
from datastore_service.client.base import DatastoreError
from datastore_service.client.breaker import BreakerState, CircuitBreaker
from datastore_service.client.link import Link
from datastore_service.client.remote import DeadlineMissedError, StepState
from datastore_service.client.resilient import ResilientDatastore
from datastore_service.engine.engine import Engine
from datastore_service.protocol.tree import DraftTree, Tier
from datastore_service.protocol.types import Budget, Entry, Opening, Query, Reply, Status
from tests.support.remembering import Remembering
from tests.waiting import eventually

VOCAB = 100
TEXT = np.array([1, 2, 3, 4] * 10, np.int32)
REMOTE_TREE = DraftTree(
    np.array([50], np.int32), np.array([-1], np.int32), np.array([0.5], np.float32), np.array([1], np.uint8)
)


class Primary:
    """Stands for a GrpcDatastore. mode: ok, slow, gone or refusing (steps alone: their stream breaks); statuses: of sessions that
    are not OK, with `known`; submitted: when the last step was; awaited: the `until` of each `collect`."""

    def __init__(self) -> None:
        self.mode = "ok"
        self.statuses: dict[str, tuple[Status, int]] = {}
        self.asked: list[list[Entry]] = []
        self.posted: list[Entry] = []
        self.submitted = 0.0
        self.awaited: list[float] = []

    def submit(self, entries) -> int:
        if self.mode in ("gone", "refusing"):
            raise DatastoreError(self.mode)
        self.submitted = time.monotonic()
        self.asked.append(list(entries))
        return len(self.asked)

    def collect(self, step, entries, until):
        self.awaited.append(until)
        if self.mode == "slow":
            time.sleep(max(0, until - time.monotonic()))
            raise DeadlineMissedError("deadline missed")
        return [self._reply(entry) for entry in self.asked[step - 1]]

    @property
    def disconnect_reason(self):
        return "gone" if self.mode == "gone" else ""

    def state_of(self, step):
        return StepState.ANSWERED if self.mode == "ok" else StepState.PENDING

    def send(self, entries) -> None:
        if self.mode == "gone":
            raise DatastoreError("gone")
        self.posted += entries

    def post(self, entries) -> None:
        if self.mode != "gone":
            self.send(entries)

    def close(self) -> None:
        self.mode = "gone"

    def _reply(self, entry: Entry) -> Reply:
        status, known = self.statuses.get(entry.session, (Status.OK, entry.start + len(entry.tokens)))
        return Reply(status, known, REMOTE_TREE)


@pytest.fixture
def primary():
    return Primary()


def over(links, local=None) -> Remembering:
    return Remembering(lambda texts: ResilientDatastore(links, local or Engine(VOCAB), texts))


@pytest.fixture
def datastore(primary):
    breaker = CircuitBreaker(failures=2, first_delay=0.05)
    datastore = over([Link("a:1", primary, breaker)])
    datastore.post([opened("s")])
    return datastore


def opened(name: str, tokens=TEXT) -> Entry:
    return Entry(name, tokens=tokens, opening=Opening("talk", True, len(tokens)))


def ask(datastore, *names: str, deadline: float = 0.05) -> list[Reply]:
    return datastore.step([Entry(name, start=40, budget=Budget(4)) for name in names], deadline)


def fallen_back(reply: Reply) -> bool:
    return reply.status is Status.OK and reply.tree.tokens.tolist() == [1, 2, 3, 4]


def test_takes_the_service_s_drafts(datastore):
    assert ask(datastore, "s")[0].tree is REMOTE_TREE


@pytest.mark.parametrize("mode", ["slow", "gone"])
def test_falls_back_then_stops_asking_then_asks_again(datastore, primary, mode):
    primary.mode = mode
    for _ in range(2):
        (reply,) = ask(datastore, "s")
        assert fallen_back(reply)
        assert set(reply.tree.sources) == {Tier.SESSION}
    assert datastore.links["a:1"].breaker.state is BreakerState.OPEN
    asked, awaited = len(primary.asked), len(primary.awaited)
    for _ in range(20):
        assert fallen_back(ask(datastore, "s")[0])
    assert len(primary.awaited) == awaited, "no step waits for it"
    assert all(not entries for entries in primary.asked[asked:])
    primary.mode = "ok"
    eventually(lambda: ask(datastore, "s")[0].tree is REMOTE_TREE)
    assert datastore.links["a:1"].breaker.state is BreakerState.CLOSED


def test_a_probe_whose_stream_broke_is_no_answer(primary):
    breaker, states = CircuitBreaker(failures=1, first_delay=0.0), [StepState.LOST, StepState.ANSWERED]
    link = Link("a:1", primary, breaker)
    primary.state_of = lambda step: states[step - 1]
    breaker.failed()
    for probes in (1, 1, 2):  # each is sent by one call, and looked at by the next
        link.probe()
        assert (len(primary.asked), breaker.state) == (probes, BreakerState.OPEN)
    link.probe()
    assert breaker.state is BreakerState.HALF_OPEN


def asking(name: str, *tokens: int) -> Entry:
    return Entry(name, start=40, queries=(Query(np.array(tokens, np.int32), Budget(2)),))


def test_queries_that_an_earlier_service_passes_over_are_answered_from_the_session(datastore, caplog):
    for _ in range(2):
        (reply,) = datastore.step([asking("s", 1, 2)], 0.05)
        assert reply.tree is REMOTE_TREE
        assert [tree.tokens.tolist() for tree in reply.trees] == [[3, 4]]
    assert [record.message for record in caplog.records if "queries" in record.message] == [
        "datastore a:1: does not answer queries; they are answered from sessions alone"
    ]


@pytest.mark.parametrize("mode", ["slow", "gone"])
def test_queries_are_answered_from_the_session_while_the_service_is_not(datastore, primary, mode):
    primary.mode = mode
    drafts = metrics.FALLBACK_DRAFTS._value.get()
    (reply,) = datastore.step([asking("s", 1, 2)], 0.05)
    assert [tree.tokens.tolist() for tree in reply.trees] == [[3, 4]]
    assert metrics.FALLBACK_DRAFTS._value.get() == drafts + 1


def test_a_missed_deadline_costs_no_more_than_itself(datastore, primary):
    primary.mode = "slow"
    started = time.monotonic()
    ask(datastore, "s", deadline=0.05)
    assert time.monotonic() - started >= 0.05
    (until,) = primary.awaited
    assert until <= primary.submitted + 0.05


def test_unknown_session_is_sent_again_whole(datastore, primary):
    primary.posted.clear()
    datastore.step([Entry("s", start=40, tokens=np.array([9], np.int32))], 0.05)
    primary.statuses["s"] = Status.UNKNOWN_SESSION, 0
    (reply,) = datastore.step([Entry("s", start=41, budget=Budget(4))], 0.05)
    assert (reply.status, reply.known) == (Status.OK, 41)
    (again,) = primary.posted
    assert (again.start, again.tokens.tolist()) == (0, [*TEXT, 9])
    assert again.opening == Opening("talk", True, 40)


def test_gap_is_filled_from_where_it_begins(datastore, primary):
    primary.posted.clear()
    primary.statuses["s"] = Status.GAP, 30
    assert fallen_back(ask(datastore, "s")[0])
    (again,) = primary.posted
    assert (again.start, again.tokens.tolist(), again.opening) == (30, TEXT[30:].tolist(), None)


def test_over_budget_is_not_sent_again(datastore, primary):
    primary.posted.clear()
    primary.statuses["s"] = Status.OVER_BUDGET, 0
    assert fallen_back(ask(datastore, "s")[0])
    assert primary.posted == []


def test_one_lost_session_leaves_the_others_alone(datastore, primary):
    datastore.post([opened("t")])
    primary.statuses["t"] = Status.UNKNOWN_SESSION, 0
    first, second = ask(datastore, "s", "t")
    assert first.tree is REMOTE_TREE
    assert fallen_back(second)


def test_a_session_never_opened_is_unknown_while_the_service_is_gone(datastore, primary):
    primary.mode = "gone"
    assert ask(datastore, "never")[0].status is Status.UNKNOWN_SESSION


def last_entry_of(datastore, primary, session: str, start: int, **fields) -> Entry:
    """What the service is told at the session's end."""
    primary.posted.clear()
    datastore.post([Entry(session, start=start, closing=True, **fields)])
    (last,) = primary.posted
    assert (last.session, last.closing) == (session, True)
    return last


def whole(last: Entry) -> bool:
    """Whether a service that knows nothing of the session can publish its text."""
    return (last.start, last.opening) == (0, Opening("talk", True, 40))


@pytest.mark.parametrize("mode", ["slow", "refusing"])
def test_a_session_that_ends_while_its_service_is_not_asked_is_sent_whole(datastore, primary, mode):
    """The service may have been started again since: then it knows nothing of the session."""
    primary.mode = mode
    for _ in range(3):
        ask(datastore, "s")
    asked = len(primary.asked)
    primary.posted.clear()
    datastore.post([opened("t")])
    for start in (40, 41):
        datastore.step([Entry("s", start=start, tokens=np.array([start], np.int32))], 0.05)
    assert primary.posted == [] and all(not entries for entries in primary.asked[asked:])
    last = last_entry_of(datastore, primary, "s", 42, tokens=np.array([42], np.int32))
    assert whole(last) and last.tokens.tolist() == [*TEXT, 40, 41, 42]
    last = last_entry_of(datastore, primary, "t", 40)
    assert whole(last) and last.tokens.tolist() == TEXT.tolist()


def test_a_session_whose_opening_was_lost_is_sent_whole(datastore, primary):
    """No stream was open, and no step has shown it."""
    primary.mode = "gone"
    datastore.post([opened("t")])
    primary.mode = "ok"
    last = last_entry_of(datastore, primary, "t", 40)
    assert whole(last) and last.tokens.tolist() == TEXT.tolist()


@pytest.mark.parametrize("mode", ["slow", "refusing"])
def test_a_session_whose_last_step_was_not_answered_is_sent_whole(datastore, primary, mode):
    ask(datastore, "s")
    primary.mode = mode
    datastore.step([Entry("s", start=40, tokens=np.array([7], np.int32))], 0.05)
    last = last_entry_of(datastore, primary, "s", 41)
    assert whole(last) and last.tokens.tolist() == [*TEXT, 7]


def test_a_last_step_keeps_what_it_asks(datastore, primary):
    primary.mode = "slow"
    ask(datastore, "s")
    primary.mode = "ok"
    asks = asking("s", 1, 2)
    datastore.step([replace(asks, closing=True, expected=40)], 0.05)
    (last,) = primary.asked[-1]
    assert whole(last) and last.queries == asks.queries and last.expected == 0


@pytest.mark.parametrize("status", [Status.OK, Status.OVER_BUDGET])
def test_a_session_whose_last_step_was_answered_is_not_sent_again(datastore, primary, status):
    primary.mode = "slow"
    ask(datastore, "s")
    primary.mode, primary.statuses["s"] = "ok", (status, 40)
    ask(datastore, "s")
    last = last_entry_of(datastore, primary, "s", 40)
    assert (last.start, len(last.tokens), last.opening) == (40, 0, None)


def test_what_was_sent_again_is_not_sent_at_the_end(datastore, primary):
    primary.mode = "gone"
    for _ in range(3):
        ask(datastore, "s")
    primary.mode = "ok"
    eventually(lambda: ask(datastore, "s")[0].tree is REMOTE_TREE)
    primary.posted.clear()
    datastore.post([Entry("s", start=40, closing=True)])
    (last,) = primary.posted
    assert (last.start, len(last.tokens), last.closing) == (40, 0, True)


def test_nothing_of_a_session_outlives_it_here(primary):
    local = Engine(VOCAB)
    datastore = over([Link("a:1", primary)], local)
    datastore.post([opened("s")])
    datastore.post([Entry("s", start=40, tokens=TEXT[:10], closing=True)])
    stats = local.stats()
    assert (stats.sessions, stats.conversations, stats.tiers[Tier.LIVE].tokens) == (0, 0, 0)


def test_a_session_that_has_ended_is_not_sent_again(datastore, primary):
    primary.posted.clear()
    primary.statuses["s"] = Status.UNKNOWN_SESSION, 0
    datastore.step([Entry("s", start=40, closing=True)], 0.05)
    assert primary.posted == []
