"""A session that one instance begins and another goes on with, over real streams."""

from __future__ import annotations

import time

import numpy as np
import pytest

from datastore_service.client.postbox import Postbox
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening, Status
from datastore_service.server.limits import ServiceLimits
from tests.unit.server.service import VOCAB, running
from tests.waiting import eventually

NAMESPACE = Namespace("m", "a" * 64)
PROMPT = np.array([1, 2, 3, 4] * 10, np.int32)
GRACE = 60.0


@pytest.fixture
def service():
    with running(ServiceLimits(grace=GRACE)) as service:
        yield service


def stream(service) -> GrpcDatastore:
    opened = GrpcDatastore(service.endpoint, NAMESPACE)
    assert opened.wait_connected(60)
    return opened


@pytest.fixture
def prefill(service):
    postbox = Postbox({service.endpoint: stream(service)})
    yield postbox
    postbox.close()


@pytest.fixture
def decode(service):
    opened = stream(service)
    yield opened
    opened.close()


def begin(prefill, name: str) -> None:
    prefill.post([Entry(name, tokens=PROMPT, opening=Opening("", True, len(PROMPT), handing_over=True))])


def go_on(decode, name: str):
    """The first step of a request that another instance has prefilled."""
    text = np.append(PROMPT, np.int32(1))
    entry = Entry(
        name, tokens=text, budget=Budget(4), opening=Opening("", True, len(PROMPT)), expected=len(PROMPT)
    )
    return decode.step([entry], 60.0)[0]


def sessions(service) -> list[str]:
    return [session.name for hosted in service.namespaces for session in hosted.engine.sessions()]


def sessions_after(service, seconds: float) -> list[str]:
    """Those that the service leaves open so long from now."""
    for hosted in service.namespaces:
        hosted.close_expired(time.monotonic() + seconds)
    return sessions(service)


def leave(service, client) -> None:
    """Ends the client's stream."""
    streams = service.drafting.streams
    client.close()
    eventually(lambda: service.drafting.streams == streams - 1)


def test_the_first_step_drafts_from_the_prompt_that_the_other_instance_sent(service, prefill, decode):
    begin(prefill, "s")
    eventually(lambda: sessions(service) == ["s"])
    reply = go_on(decode, "s")
    assert (reply.status, reply.known, reply.tree.tokens.tolist()) == (Status.OK, 41, [2, 3, 4, 1])


def test_the_session_outlives_who_began_it_and_ends_with_who_goes_on(service, prefill, decode):
    begin(prefill, "s")
    eventually(lambda: sessions(service) == ["s"])
    go_on(decode, "s")
    leave(service, prefill)
    assert sessions_after(service, 3 * GRACE) == ["s"]
    leave(service, decode)
    assert sessions_after(service, GRACE / 2) == ["s"]
    assert sessions_after(service, GRACE) == []


@pytest.mark.parametrize("dies", [False, True])
def test_a_session_that_nobody_goes_on_with_expires(service, prefill, dies):
    begin(prefill, "s")
    eventually(lambda: sessions(service) == ["s"])
    if dies:
        leave(service, prefill)
    assert sessions_after(service, GRACE / 2) == ["s"]
    assert sessions_after(service, GRACE) == []


def test_a_session_that_was_not_begun_is_reported_and_can_be_sent_whole(service, prefill, decode):
    reply = go_on(decode, "s")
    assert (reply.status, reply.known) == (Status.GAP, 0)
    begin(prefill, "s")  # late
    eventually(lambda: [s.tokens for h in service.namespaces for s in h.engine.sessions()] == [40])
    assert go_on(decode, "s").known == 41
    assert sessions_after(service, 3 * GRACE) == ["s"]


def test_a_beginning_that_differs_is_replaced_by_what_is_decoded(service, prefill, decode):
    begin(prefill, "s")
    eventually(lambda: sessions(service) == ["s"])
    other = np.array([9, 8, 7, 9, 8], np.int32) % VOCAB
    entry = Entry("s", tokens=other, budget=Budget(2), opening=Opening("", True, 5))
    reply = decode.step([entry], 60.0)[0]
    assert (reply.status, reply.known, reply.tree.tokens.tolist()) == (Status.OK, 5, [7, 9])
