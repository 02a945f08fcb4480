"""A session of two streams: a worker's, and that of a draft process beside it."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening, Query, Reply, Status
from datastore_service.server.limits import ServiceLimits
from tests.unit.server.service import running
from tests.waiting import eventually

NAMESPACE = Namespace("m", "a" * 64)
TEXT = [1, 2, 3, 4] * 10
GRACE = 60.0
ASK = Budget(4)


@pytest.fixture
def service():
    with running(ServiceLimits(grace=GRACE)) as service:
        yield service


def stream(service) -> GrpcDatastore:
    opened = GrpcDatastore(service.endpoint, NAMESPACE)
    assert opened.wait_connected(60)
    return opened


@pytest.fixture
def worker(service):
    opened = stream(service)
    yield opened
    opened.close()


@pytest.fixture
def draft(service):
    opened = stream(service)
    yield opened
    opened.close()


def ids(tokens) -> np.ndarray:
    return np.array(list(tokens), np.int32)


def tell(datastore, start: int, tokens=(), name: str = "s", **fields) -> Reply:
    (reply,) = datastore.step([Entry(name, start, ids(tokens), **fields)], 60.0)
    return reply


def opened(datastore, tokens=TEXT, name: str = "s") -> Reply:
    return tell(datastore, 0, tokens, name, opening=Opening(prompt_length=len(tokens)))


def sessions(service) -> list[str]:
    return [session.name for hosted in service.namespaces for session in hosted.engine.sessions()]


def text_of(service, name: str = "s") -> list[int]:
    (hosted,) = service.namespaces
    return hosted.engine._sessions._open[name].index.text().tolist()


def leave(service, datastore) -> list[str]:
    """Ends a stream; the sessions that are left when the grace is over."""
    streams = service.drafting.streams
    datastore.close()
    eventually(lambda: service.drafting.streams == streams - 1)
    (hosted,) = service.namespaces
    hosted.close_expired(time.monotonic() + GRACE / 2)
    assert sessions(service) == ["s"], "whoever comes back within the grace finds it"
    hosted.close_expired(time.monotonic() + GRACE)
    return sessions(service)


@pytest.mark.parametrize("first_to_go", ["worker", "draft"])
def test_it_ends_with_the_last_of_them(service, worker, draft, first_to_go):
    streams = {"worker": worker, "draft": draft}
    opened(worker)
    assert tell(draft, 40).status is Status.OK
    assert leave(service, streams.pop(first_to_go)) == ["s"]
    (left,) = streams.values()
    assert tell(left, 40, [1], budget=ASK).tree.tokens.tolist() == [2, 3, 4, 1]
    assert leave(service, left) == []


def test_the_closing_of_either_ends_it(service, worker, draft):
    for closes, other in ((worker, draft), (draft, worker)):
        opened(worker)
        tell(draft, 40)
        tell(closes, 40, closing=True)
        assert sessions(service) == []
        assert tell(other, 40, [1]).status is Status.UNKNOWN_SESSION


def test_both_may_open_it(service, worker, draft):
    assert opened(worker).known == 40
    assert opened(draft, TEXT[:30]).known == 40, "a part of the same text opens nothing anew"
    assert opened(draft, [*TEXT, 1, 2]).known == 42
    assert sessions(service) == ["s"]


def test_what_one_has_told_is_skipped_of_the_other_and_gaps_are_seen(service, worker, draft):
    opened(worker)
    assert tell(draft, 40, [7, 8]).known == 42
    reply = tell(worker, 40, [7], budget=ASK)
    assert (reply.status, reply.known) == (Status.OK, 42), "behind: nothing is applied twice"
    assert tell(worker, 41, [8, 9]).known == 43, "what is new of it is added"
    reply = tell(draft, 44, [1])
    assert (reply.status, reply.known) == (Status.GAP, 43)
    assert tell(draft, 42, [9, 1]).known == 44
    assert text_of(service) == [*TEXT, 7, 8, 9, 1]


def test_queries_of_the_one_behind_mean_the_text_as_it_knows_it(service, worker, draft):
    opened(worker)
    tell(worker, 40, [1, 2])
    queries = tuple(Query(ids(tokens), ASK) for tokens in ([1, 2, 3], [1, 9], [1]))
    reply = tell(draft, 40, queries=queries)
    assert (reply.status, reply.known) == (Status.OK, 42)
    assert [tree.tokens.tolist() for tree in reply.trees] == [[4, 1, 2, 3], [], []]


def test_a_draft_beside_another_stream_asks_disturbs_no_draft(worker, draft):
    """Nor the text: queries of one stream between the steps of the other."""
    opened(worker)
    before = tell(worker, 40, budget=ASK).tree.tokens.tolist()
    tell(draft, 40, queries=(Query(ids([9, 9, 9]), ASK),))
    assert tell(worker, 40, budget=ASK).tree.tokens.tolist() == before == [1, 2, 3, 4]


def test_two_streams_that_tell_the_same_text_at_once_leave_it_whole(service, worker, draft):
    """Each in pieces of its own, some repeated, while it asks."""
    text = np.random.default_rng(0).integers(0, 9, 600).tolist()
    opened(worker, text[:1])
    failures: list = []

    def go_through(datastore, seed: int) -> None:
        rng, at = random.Random(seed), 1
        while at < len(text):
            start = max(1, at - rng.randrange(4))
            at = min(len(text), at + rng.randrange(1, 5))
            queries = (Query(ids(rng.choices(range(9), k=3)), ASK),)
            reply = tell(datastore, start, text[start:at], budget=ASK, queries=queries)
            if reply.status is not Status.OK or reply.known < at:
                failures.append(reply)

    threads = [threading.Thread(target=go_through, args=(s, i)) for i, s in enumerate((worker, draft))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert text_of(service) == text
    whole = tell(worker, 600, budget=ASK).tree
    alone = opened(worker, text, "alone")
    assert alone.known == 600
    assert tell(worker, 600, name="alone", budget=ASK).tree.tokens.tolist() == whole.tokens.tolist()


def test_a_session_handed_over_is_shared_by_those_who_go_on(service, worker, draft):
    """A prefill instance begins it; the decode instance and its draft process go on."""
    prefill = stream(service)
    prefill.post([Entry("s", tokens=ids(TEXT), opening=Opening("", True, 40, handing_over=True))])
    eventually(lambda: sessions(service) == ["s"])
    prefill.close()
    eventually(lambda: service.drafting.streams == 2)
    assert tell(worker, 40, [1]).known == 41
    assert tell(draft, 41, [2]).known == 42
    assert leave(service, worker) == ["s"]
    assert leave(service, draft) == []
