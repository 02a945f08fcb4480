"""Tenants as a kind: wherever a tenant's name or text goes, names that look alike are two tenants, and a text is its own tenant's alone.

Who adds a place that they reach adds a row to a table here.
"""

import itertools
import json
import logging
import unicodedata
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from html import unescape

import numpy as np
import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from prometheus_client import generate_latest  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from datastore_service.cli.main import _tenant_priors  # noqa: E402
from datastore_service.client import NoTexts, open_datastore, open_postbox  # noqa: E402
from datastore_service.client import wire as client_wire  # noqa: E402
from datastore_service.client.link import Link  # noqa: E402
from datastore_service.client.remote import GrpcDatastore  # noqa: E402
from datastore_service.client.resilient import ResilientDatastore  # noqa: E402
from datastore_service.engine.engine import Engine  # noqa: E402
from datastore_service.engine.limits import Limits  # noqa: E402
from datastore_service.engine.segment import build_segment  # noqa: E402
from datastore_service.engine.workspaces import BLOCK, LEAST_TOKENS  # noqa: E402
from datastore_service.protocol.names import hashed_name  # noqa: E402
from datastore_service.protocol.tenants import step_by_tenant  # noqa: E402
from datastore_service.protocol.tree import EMPTY_TREE  # noqa: E402
from datastore_service.protocol.types import EMPTY_TOKENS, Budget, Entry, Namespace, Opening, Status  # noqa: E402
from datastore_service.server import wire as server_wire  # noqa: E402
from datastore_service.server.engine_factory import engine_factory  # noqa: E402
from datastore_service.server.history import History  # noqa: E402
from datastore_service.server.limits import ServiceLimits  # noqa: E402
from datastore_service.server.logs import JsonFormatter  # noqa: E402
from datastore_service.server.metrics import ServiceMetrics  # noqa: E402
from datastore_service.server.namespaces import Namespaces  # noqa: E402
from datastore_service.server.status_page import StatusPage  # noqa: E402
from datastore_service.storage.data_directory import DataDirectory, folder_name  # noqa: E402
from datastore_service.storage.manifest import Manifest, write_manifest  # noqa: E402
from datastore_service.storage.segment_file import SUFFIX, write_segment  # noqa: E402
from proto_gen.specstore.v1 import drafting_pb2 as pb  # noqa: E402
from sglang_patches.draft_side.draft import Draft  # noqa: E402
from sglang_patches.draft_side.seams import Row  # noqa: E402
from sglang_patches.draft_side.side import DraftSide  # noqa: E402
from sglang_patches.drafting.datastore import DatastoreFallback, DatastoreFeed  # noqa: E402
from sglang_patches.drafting.union import first_trees  # noqa: E402
from sglang_patches.entry.request_tenants import _decoded, of_tenant  # noqa: E402
from sglang_patches.exchange.messages import GREEDY, Opened  # noqa: E402
from sglang_patches.exchange.text import Text  # noqa: E402
from sglang_patches.exchange.trie import Trie  # noqa: E402
from sglang_patches.exchange.wire import frame_of, messages_from_worker  # noqa: E402
from sglang_patches.launch.processes import free_port  # noqa: E402
from sglang_patches.ledger.requests import RequestBook, Step, tenants_of  # noqa: E402
from sglang_patches.methods.double import OwnDatastorePhrases  # noqa: E402
from sglang_patches.methods.registry import METHODS, DraftSurroundings  # noqa: E402
from sglang_patches.methods.saguaro import fallback_of  # noqa: E402
from sglang_patches.options import Options  # noqa: E402
from sglang_patches.step.acceptance import Acceptance  # noqa: E402
from tests.support.agreeing_model import model  # noqa: E402
from tests.support.draft_side import FunctionModel  # noqa: E402
from tests.tenant_names import PAIRS  # noqa: E402
from tests.unit.drafting.texts import make_req  # noqa: E402
from tests.unit.server.service import VOCAB, running  # noqa: E402
from tests.waiting import eventually  # noqa: E402

LIMITS, SECONDS = ServiceLimits(), 60.0
TEXT = np.arange(10, 40, dtype=np.int32)
PROMPT, FOUND = TEXT[:8], TEXT[8:16].tolist()
OF_REQUESTS = tenants_of(Options(request_tenant="custom_params"))
sessions = map(str, itertools.count())


def namespace(tenant=""):
    return Namespace("m", "a" * 64, tenant)


def hosting(*tenants, data=None):
    namespaces = Namespaces(engine_factory(None, VOCAB), LIMITS, data)
    for tenant in tenants:
        namespaces.open(namespace(tenant))
    return namespaces


def request_of(tenant, prompt=PROMPT):
    return make_req(next(sessions), prompt.tolist(), {"specstore": {"tenant": tenant}})


# A name crosses, and comes out as it went in.


def in_metrics(tenant):
    page = generate_latest(ServiceMetrics(hosting(tenant), LIMITS).registry).decode()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    (label,) = {sample.labels["tenant"] for sample in samples if "tenant" in sample.labels}
    return label


def on_the_status_page(tenant):
    namespaces = hosting(tenant)
    page = StatusPage(namespaces, History(namespaces), lambda: 0).html()
    heading = unescape(page.partition("<h2")[2].partition("</h2>")[0])
    return heading.partition(", tenant ")[2]


def in_an_entry(tenant):
    message = client_wire.request_message(1, [Entry("s", tenant=tenant)]).SerializeToString()
    (entry,) = server_wire.read_entries(pb.DraftRequest.FromString(message), VOCAB, LIMITS)
    return entry.tenant


def in_a_greeting(tenant):
    message = client_wire.namespace_message(namespace(tenant)).SerializeToString()
    return server_wire.read_namespace(pb.Namespace.FromString(message), LIMITS).tenant


def in_a_reply_to_an_operator(tenant):
    return pb.Namespace.FromString(
        server_wire.namespace_message(namespace(tenant)).SerializeToString()
    ).tenant


def in_what_is_sent_again(tenant):
    feed, book = feed_of_an_embedded_datastore(), RequestBook(VOCAB, True, OF_REQUESTS, lambda req: None)
    (state,) = book.open([request_of(tenant)])
    feed.open([state])
    return feed.told(state.session, 0).tenant


def feed_of_an_embedded_datastore() -> DatastoreFeed:
    return DatastoreFeed(lambda _: open_datastore("embedded", namespace(), VOCAB, tenants=True), SECONDS)


def in_a_message_to_the_draft_side(tenant):
    (opened,) = messages_from_worker().feed(frame_of([Opened("s", TEXT, 1, tenant=tenant)]))
    return opened.tenant


CROSSINGS = {
    "a header": lambda tenant: _decoded(tenant.encode().decode("latin-1"), "x-tenant"),
    "a request": lambda tenant: OF_REQUESTS(request_of(tenant)),
    "a line of the log": lambda tenant: json.loads(
        JsonFormatter().format(logging.makeLogRecord({"msg": "namespace created", "tenant": tenant}))
    )["tenant"],
    "an entry": in_an_entry,
    "a greeting": in_a_greeting,
    "a reply to an operator": in_a_reply_to_an_operator,
    "what is sent again": in_what_is_sent_again,
    "a message to the draft side": in_a_message_to_the_draft_side,
    "metrics": in_metrics,
    "the status page": on_the_status_page,
}


@pytest.mark.parametrize("crossing", CROSSINGS)
@pytest.mark.parametrize("tenant", sorted({*itertools.chain(*PAIRS.values())}))
def test_a_name_crosses_as_it_is(crossing, tenant):
    assert CROSSINGS[crossing](tenant) == tenant


# A name is a key: of one and the same thing for the same name, and of two for two names.


def folder_on_any_disk(tenant):
    """As a disk has it that takes names of another case or normal form for the same."""
    return unicodedata.normalize("NFKC", folder_name(namespace(tenant))).casefold()


def learned_by_draft_sides():
    around = DraftSurroundings(Options(), 4, 4, lambda: open_datastore("embedded", namespace(), VOCAB))
    parts = [method.draft_parts(around) for method in METHODS.values() if method.draft_parts]
    sides = [DraftSide(FunctionModel(model(1.0)), of_method, 4, 4) for of_method in parts]
    return lambda tenant: tuple(id(side._learner(tenant).predictor) for side in sides)


def namespaces_of_a_service():
    namespaces = hosting()
    return lambda tenant: namespaces.open(namespace(tenant))


def embedded_engines():
    datastore = open_datastore("embedded", namespace(), VOCAB, tenants=True)

    def engine(tenant):
        datastore.post([Entry(next(sessions), 0, TEXT, opening=Opening(), tenant=tenant)])
        return datastore._engines[tenant]

    return engine


# What makes the function from a name to its thing.
KEYS = {
    "cached prompts and sessions of SGLang": lambda: partial(of_tenant, name="key"),
    "conversations and users of sessions": lambda: partial(hashed_name, name="talk"),
    "folders": lambda: folder_on_any_disk,
    "namespaces": namespaces_of_a_service,
    "embedded engines": embedded_engines,
    "learned acceptance": lambda: Acceptance()._of,
    "learned gains of waiting": lambda: (
        fallback_of("datastore", DatastoreFallback(None, Budget(4)), 4)._learned
    ),
    "learned outcomes": learned_by_draft_sides,
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("key", KEYS)
def test_two_names_are_two_keys(key, pair):
    of = KEYS[key]()
    one, other = PAIRS[pair]
    assert of(one) != of(other) and of(other) == of(other)


# A text is proposed to its tenant alone. The second of two tells it.


def says(tenant, conversation=""):
    return Entry(next(sessions), 0, TEXT, opening=Opening(conversation), closing=True, tenant=tenant)


def asks(tenant, conversation=""):
    opening = Opening(conversation, prompt_length=len(PROMPT))
    return Entry(next(sessions), 0, PROMPT, budget=Budget(8), opening=opening, tenant=tenant)


def drafted(replies):
    assert all(reply.status is Status.OK for reply in replies)
    return [reply.tree.tokens.tolist() for reply in replies]


@contextmanager
def embedded(tmp_path):
    yield partial(open_datastore("embedded", namespace(), VOCAB, tenants=True).step, deadline=SECONDS)


@contextmanager
def service(tmp_path):
    with running() as hosted:
        datastore = GrpcDatastore(hosted.endpoint, namespace(), tenants=True)
        assert datastore.wait_connected(SECONDS)
        yield partial(datastore.step, deadline=SECONDS)
        datastore.close()


@contextmanager
def stored(tmp_path):
    """A service that is started again between any two steps."""

    def step(entries):
        namespaces = hosting(data=DataDirectory(tmp_path, VOCAB))
        hosted = lambda tenant: namespaces.open(namespace(tenant))  # noqa: E731
        replies = step_by_tenant(entries, lambda tenant: partial(hosted(tenant).step, 1))
        namespaces.close()
        return replies

    yield step


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("datastore", [embedded, service, stored])
def test_an_output_is_its_tenant_s_alone(datastore, pair, tmp_path):
    listener, teller = PAIRS[pair]
    with datastore(tmp_path) as step:
        step([says(teller)])
        assert drafted(step([asks(listener), asks(teller)])) == [[], FOUND]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("datastore", [embedded, service])
def test_a_conversation_is_its_tenant_s_alone(datastore, pair, tmp_path):
    listener, teller = PAIRS[pair]
    with datastore(tmp_path) as step:
        said = says(teller, "talk")
        said.opening = Opening("talk", publish=False)
        step([said])
        assert drafted(step([asks(listener, "talk"), asks(teller, "talk")])) == [[], FOUND]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("datastore", [embedded, service])
def test_a_group_is_its_tenant_s_alone(datastore, pair, tmp_path):
    """What one tenant's session writes drafts for its sibling at once, and for no other tenant's of the same group."""
    listener, teller = PAIRS[pair]
    with datastore(tmp_path) as step:
        begun = [asks(tenant) for tenant in (teller, listener, teller)]
        for entry in begun:
            entry.opening = Opening(publish=False, prompt_length=len(PROMPT), group="prompt 7")
        step(begun)
        writer, *asking = [
            replace(entry, start=len(PROMPT), tokens=EMPTY_TOKENS, opening=None) for entry in begun
        ]
        step([replace(writer, tokens=TEXT[8:])])
        assert drafted(step(asking)) == [[], FOUND]


@pytest.mark.parametrize("pair", PAIRS)
def test_the_client_s_own_engine_has_no_groups(pair):
    away = GrpcDatastore(f"127.0.0.1:{free_port()}", namespace(), tenants=True)
    datastore = ResilientDatastore([Link("away", away)], Engine(VOCAB), NoTexts())
    said = [says(tenant) for tenant in PAIRS[pair]]
    for entry in said:
        entry.opening, entry.closing = Opening(publish=False, prompt_length=8, group="prompt 7"), False
    said[0].tokens, said[0].budget, said[0].opening = PROMPT, Budget(8), said[1].opening
    datastore.post(said[1:])
    assert drafted(datastore.step(said[:1], 0.0)) == [[]]
    datastore.close()


@pytest.mark.parametrize("pair", PAIRS)
def test_the_client_s_own_engine_keeps_no_tenant_s_output(pair):
    """It is one for all tenants, and drafts while the service is away."""
    listener, teller = PAIRS[pair]
    away = GrpcDatastore(f"127.0.0.1:{free_port()}", namespace(), tenants=True)
    datastore = ResilientDatastore([Link("away", away)], Engine(VOCAB), NoTexts())
    datastore.post([says(teller, "talk")])
    assert drafted(datastore.step([asks(listener, "talk"), asks(teller, "talk")], 0.0)) == [[], []]
    datastore.close()


@pytest.mark.parametrize("pair", PAIRS)
def test_a_prior_is_its_tenant_s_alone(pair, tmp_path):
    listener, teller = PAIRS[pair]
    write_segment(tmp_path / f"0{SUFFIX}", build_segment([TEXT], VOCAB), namespace().tokenizer)
    write_manifest(tmp_path, Manifest(namespace().tokenizer, VOCAB, (f"0{SUFFIX}",)))
    given = _tenant_priors([f"{teller}={tmp_path}"])
    namespaces = Namespaces(engine_factory(None, VOCAB, of_tenants=given), LIMITS)
    of = lambda tenant: namespaces.open(namespace(tenant)).step(1, [asks(tenant)])  # noqa: E731
    assert drafted([*of(listener), *of(teller)]) == [[], FOUND]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_workspace_is_its_tenant_s_alone(pair):
    """Over the wire: what one tenant's session has read drafts for that tenant's next, and for no other of the same workspace."""
    listener, teller = PAIRS[pair]
    read = np.arange(10, 10 + 2 * BLOCK, dtype=np.int32)
    with running(engine_limits=Limits(workspace_tokens=LEAST_TOKENS)) as hosted:
        datastore = GrpcDatastore(hosted.endpoint, namespace(), tenants=True)
        assert datastore.wait_connected(SECONDS)
        opening = Opening(prompt_length=len(read), publish=False, workspace="project")
        datastore.step([Entry("t", 0, read, opening=opening, closing=True, tenant=teller)], SECONDS)
        asking = [asks(tenant) for tenant in (listener, teller)]
        for entry in asking:
            entry.opening = Opening(workspace="project")
        assert drafted(datastore.step(asking, SECONDS)) == [[], FOUND]
        datastore.close()


@pytest.mark.parametrize("pair", PAIRS)
def test_a_snapshot_is_its_tenant_s_alone(pair, tmp_path):
    listener, teller = PAIRS[pair]
    data = DataDirectory(tmp_path, VOCAB)
    namespaces = hosting(listener, teller, data=data)
    hosted = namespaces.open(namespace(teller))
    hosted.step(1, [says(teller)])
    hosted.engine.snapshot("kept")
    assert [data.has_snapshot(namespace(tenant), "kept") for tenant in (listener, teller)] == [False, True]
    namespaces.close()


@pytest.mark.parametrize("pair", PAIRS)
def test_a_prompt_is_handed_over_to_its_tenant_alone(pair):
    """From a prefill instance to a decode instance."""
    listener, teller = PAIRS[pair]
    with running() as hosted:
        prefill = open_postbox(hosted.endpoint, namespace(), tenants=True)
        decode = GrpcDatastore(hosted.endpoint, namespace(), tenants=True)
        eventually(lambda: not any(stream.disconnect_reason for stream in prefill._streams.values()))
        assert decode.wait_connected(SECONDS)
        prefill.post([Entry("s", 0, PROMPT, opening=Opening(handing_over=True), tenant=teller)])
        opened = lambda: [of.namespace.tenant for of in hosted.namespaces if of.engine.has_session("s")]  # noqa: E731
        eventually(lambda: opened() == [teller])
        goes_on = [
            Entry("s", 0, TEXT[:9], opening=Opening(), expected=len(PROMPT), tenant=tenant)
            for tenant in (listener, teller)
        ]
        statuses = [reply.status for reply in decode.step(goes_on, SECONDS)]
        assert statuses == [Status.GAP, Status.OK]
        prefill.close()
        decode.close()


@pytest.mark.parametrize("pair", PAIRS)
def test_the_answer_to_a_request_is_its_tenant_s_alone(pair):
    """From `custom_params` to the drafts."""
    feed = feed_of_an_embedded_datastore()
    book = RequestBook(VOCAB, True, OF_REQUESTS, lambda req: None)
    listener, teller = map(request_of, PAIRS[pair])
    feed.open(book.open([teller]))
    teller.output_ids.extend(TEXT[8:].tolist())
    feed.close([book.end(teller)])
    asking = [listener, request_of(PAIRS[pair][1])]
    states, _ = book.read(Step(asking, [len(PROMPT) + 1] * 2, [TEXT[8:9].tolist()] * 2))
    parts = DatastoreFallback(feed, Budget(7)).parts(states, [EMPTY_TREE] * 2)
    assert [tree.tokens.tolist() for tree in first_trees(parts)] == [[], FOUND[1:]]


@pytest.mark.parametrize("pair", PAIRS)
def test_what_a_draft_process_keeps_is_its_tenant_s_alone(pair):
    datastore = open_datastore("embedded", namespace(), VOCAB, tenants=True)
    phrases = OwnDatastorePhrases(datastore, 8, SECONDS)

    def draft(tenant, text):
        return Draft(next(sessions), Text(text), GREEDY, Trie(len(text)), tenant=tenant)

    listener, teller = PAIRS[pair]
    said = draft(teller, TEXT)
    said.published_from = 0
    phrases.phrases([Row(said, 0)], 8)
    phrases.closed(said)
    found = phrases.phrases([Row(draft(tenant, PROMPT), 0) for tenant in (listener, teller)], 8)
    assert [tree.tokens.tolist() for tree in found] == [[], FOUND]
