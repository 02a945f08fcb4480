"""Entries of several tenants: no text, conversation or session of one reaches another's drafts."""

import itertools

import numpy as np
import pytest

from datastore_service.client import embedded, open_datastore
from datastore_service.client.base import Datastore, DatastoreError
from datastore_service.client.remote import GrpcDatastore
from datastore_service.engine.segment import build_segment
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening, Reply, Status
from datastore_service.server import drafting
from datastore_service.server.engine_factory import engine_factory
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.namespaces import Namespaces
from datastore_service.storage.manifest import Manifest, write_manifest
from datastore_service.storage.segment_file import SUFFIX, write_segment
from tests.support.remembering import Remembering
from tests.unit.server.service import running
from tests.waiting import eventually

NAMESPACE = Namespace("m", "a" * 64)
VOCAB = 100
SECRET = np.arange(10, 40, dtype=np.int32)
PROMPT = SECRET[:8]
SECONDS = 60.0
TENANTS = ("", "a", "b")


@pytest.fixture(params=["embedded", "service"])
def datastore(request, monkeypatch):
    if request.param == "embedded":
        yield open_datastore("embedded", NAMESPACE, VOCAB, tenants=True)
        return
    monkeypatch.setattr("datastore_service.client.GREETING_SECONDS", SECONDS)
    with running() as service:
        opened = open_datastore(service.endpoint, NAMESPACE, VOCAB, tenants=True)
        yield opened
        opened.close()


names = map(str, itertools.count())


def asks(tenant: str, tokens=PROMPT, conversation: str = "") -> Entry:
    opening = Opening(conversation, prompt_length=len(tokens))
    return Entry(next(names), 0, tokens, budget=Budget(8), opening=opening, tenant=tenant)


def says(tenant: str, conversation: str = "") -> Entry:
    """A whole request, whose output is published."""
    return Entry(next(names), 0, SECRET, opening=Opening(conversation), closing=True, tenant=tenant)


def drafted(reply: Reply) -> list[int]:
    assert reply.status is Status.OK
    return reply.tree.tokens.tolist()


def draft(datastore: Datastore, *entries: Entry) -> list[list[int]]:
    replies = datastore.step(entries, SECONDS)
    datastore.post([entry.end_of_session() for entry in entries])
    return [drafted(reply) for reply in replies]


@pytest.mark.parametrize("teller", TENANTS)
def test_a_published_text_is_proposed_to_its_tenant_alone(datastore, teller):
    datastore.post([says(teller)])
    found = dict(zip(TENANTS, draft(datastore, *map(asks, TENANTS)), strict=True))
    assert found.pop(teller) == SECRET[8:16].tolist()
    assert list(found.values()) == [[], []]


def test_a_conversation_goes_on_with_its_tenant_alone(datastore):
    datastore.post([says("a", "talk")])
    found = draft(datastore, asks("b", conversation="talk"), asks("a", conversation="talk"))
    assert found == [[], SECRET[8:16].tolist()]


def test_sessions_of_one_name_are_two(datastore):
    first, second = asks("a", SECRET), asks("b")
    second.session = first.session
    datastore.step([first], SECONDS)
    assert drafted(*datastore.step([second], SECONDS)) == []


def test_a_session_ends_with_its_tenant(datastore):
    """Each entry that a client makes of another one names the tenant."""
    entry = asks("a")
    assert entry.end_of_session().tenant == "a"
    datastore.step([entry], SECONDS)
    datastore.post([entry.end_of_session()])
    further = Entry(entry.session, len(PROMPT), PROMPT, tenant="a")
    (reply,) = datastore.step([further], SECONDS)
    assert reply.status in (Status.UNKNOWN_SESSION, Status.GAP)


def test_a_session_is_sent_again_under_its_tenant(monkeypatch):
    monkeypatch.setattr("datastore_service.client.GREETING_SECONDS", SECONDS)
    with running() as service:
        datastore = Remembering(
            lambda texts: open_datastore(service.endpoint, NAMESPACE, VOCAB, tenants=True, texts=texts)
        )
        entry = asks("a")
        datastore.step([entry], SECONDS)
        hosted = {hosted.namespace.tenant: hosted for hosted in service.namespaces}
        hosted["a"].engine.flush()
        datastore.step([Entry(entry.session, len(PROMPT), PROMPT, tenant="a")], SECONDS)
        eventually(lambda: hosted["a"].engine.has_session(entry.session), "it was not sent again", SECONDS)
        assert not hosted[""].engine.has_session(entry.session)
        datastore.close()


def test_no_room_for_a_tenant_is_that_tenants_alone(caplog):
    with running(ServiceLimits(namespaces=2)) as service:
        datastore = GrpcDatastore(service.endpoint, NAMESPACE, tenants=True)
        assert datastore.wait_connected(SECONDS)
        for _ in range(2):
            statuses = [reply.status for reply in datastore.step([*map(asks, TENANTS)], SECONDS)]
            assert statuses == [Status.OK, Status.OK, Status.OVER_BUDGET]
        assert [
            record.tenant for record in caplog.records if record.message.startswith("tenant refused")
        ] == ["b"]
        counted = service.metrics.registry.get_sample_value(
            "specstore_over_budget_total", {"model": NAMESPACE.model}
        )
        assert counted == 2
        datastore.close()


def test_no_room_in_an_embedded_datastore(monkeypatch, caplog):
    monkeypatch.setattr(embedded, "MOST_TENANTS", 1)
    datastore = open_datastore("embedded", NAMESPACE, VOCAB, tenants=True)
    for _ in range(2):
        statuses = [reply.status for reply in datastore.step([*map(asks, TENANTS)], SECONDS)]
        assert statuses == [Status.OK, Status.OK, Status.OVER_BUDGET]
    (said,) = [record.message for record in caplog.records if record.name == embedded.__name__]
    assert "1 tenants" in said


def test_a_namespace_that_was_dropped_is_made_anew():
    with running() as service:
        datastore = GrpcDatastore(service.endpoint, NAMESPACE, tenants=True)
        assert datastore.wait_connected(SECONDS)
        datastore.step([says("a")], SECONDS)
        (hosted,) = (hosted for hosted in service.namespaces if hosted.namespace.tenant == "a")
        service.namespaces.drop(hosted)
        assert drafted(*datastore.step([asks("a")], SECONDS)) == []
        datastore.close()


def test_sessions_of_a_broken_stream_are_closed_in_every_namespace():
    with running(ServiceLimits(grace=0.1)) as service:
        datastore = GrpcDatastore(service.endpoint, NAMESPACE, tenants=True)
        assert datastore.wait_connected(SECONDS)
        datastore.step([*map(asks, TENANTS)], SECONDS)
        sessions = lambda: sum(len(hosted.engine.sessions()) for hosted in service.namespaces)  # noqa: E731
        assert sessions() == 3
        datastore.close()
        eventually(lambda: sessions() == 0, "sessions are left", SECONDS)


def test_a_service_that_would_mix_tenants_is_not_used(monkeypatch):
    answer = drafting._Stream.answer

    def earlier(self, request):
        """The reply of a version before tenants."""
        reply = answer(self, request)
        reply.ClearField("tenants")
        return reply

    monkeypatch.setattr(drafting._Stream, "answer", earlier)
    with running() as service:
        datastore = GrpcDatastore(service.endpoint, NAMESPACE, tenants=True)
        eventually(lambda: "earlier version" in datastore.disconnect_reason, "it is used", SECONDS)
        with pytest.raises(DatastoreError, match="mix"):
            datastore.step([asks("a")], SECONDS)
        datastore.close()
        plain = GrpcDatastore(service.endpoint, NAMESPACE)
        assert plain.wait_connected(SECONDS)
        plain.close()


def write_prior(folder, text):
    folder.mkdir()
    write_segment(folder / f"0{SUFFIX}", build_segment([text], VOCAB), NAMESPACE.tokenizer)
    write_manifest(folder, Manifest(NAMESPACE.tokenizer, VOCAB, (f"0{SUFFIX}",)))
    return folder


def test_a_tenants_own_prior_is_read_by_that_tenant_alone(tmp_path):
    common = write_prior(tmp_path / "common", np.arange(50, 80, dtype=np.int32))
    own = write_prior(tmp_path / "own", SECRET)
    namespaces = Namespaces(engine_factory(common, VOCAB, of_tenants={"a": own}), ServiceLimits())
    for tenant in TENANTS:
        hosted = namespaces.open(Namespace(NAMESPACE.model, NAMESPACE.tokenizer, tenant))
        replies = hosted.step(1, [asks(tenant), asks(tenant, np.arange(50, 58, dtype=np.int32))])
        assert drafted(replies[0]) == (SECRET[8:16].tolist() if tenant == "a" else [])
        assert drafted(replies[1]) == list(range(58, 66))
