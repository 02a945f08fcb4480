"""The service over real gRPC: the stream's rules, admin, limits, health, reflection, drain."""

import asyncio
import functools
import queue
import threading
import time
from collections.abc import Coroutine
from urllib.request import urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from datastore_service.endpoint import parse_endpoint
from datastore_service.engine.limits import Limits
from datastore_service.engine.workspaces import LEAST_TOKENS
from datastore_service.protocol.types import Reply
from datastore_service.server import drafting
from datastore_service.server.admission import ADMIN, DRAFTING
from datastore_service.server.engine_factory import engine_factory
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.rpc_server import RpcServer
from datastore_service.server.service import Service
from datastore_service.server.warmup import MAX_OPEN_CALLS
from proto_gen.specstore.v1 import admin_pb2, admin_pb2_grpc, drafting_pb2_grpc
from proto_gen.specstore.v1 import drafting_pb2 as pb
from tests.support.replies import read_sound
from tests.unit.server.service import VOCAB, running, serving
from tests.waiting import eventually

NAMESPACE = {"model": "m", "tokenizer": "t"}
TEXT = [1, 2, 3, 4] * 10
BUDGET = {"nodes": 8, "depth": 8, "children": 4}


class Stream:
    """One Draft stream, a message at a time."""

    def __init__(self, endpoint: str, namespace: dict | None = NAMESPACE) -> None:
        self.channel = grpc.insecure_channel(endpoint)
        self._outbound: queue.SimpleQueue = queue.SimpleQueue()
        self.call = drafting_pb2_grpc.DraftingStub(self.channel).Draft(iter(self._outbound.get, None))
        self._namespace = namespace

    def ask(self, *entries: dict, step: int = 1, namespace: dict | None = None) -> list[Reply]:
        chosen, self._namespace = namespace or self._namespace, None
        self._outbound.put(pb.DraftRequest(step=step, namespace=chosen, entries=entries))
        reply = next(self.call)
        assert reply.step == step
        return read_sound(reply)

    def close(self) -> None:
        self._outbound.put(None)
        self.channel.close()


@pytest.fixture(scope="module")
def service():
    with running() as service:
        yield service


@pytest.fixture
def stream(service):
    stream = Stream(service.endpoint)
    yield stream
    stream.close()


def refusal(act) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        act()
    return error.value.code(), error.value.details()


def opened(name: str, tokens=TEXT) -> dict:
    return {"session": name, "tokens": tokens, "opening": {"prompt_length": len(tokens)}}


def test_drafts_from_the_session(stream):
    (reply,) = stream.ask(opened("a") | {"budget": BUDGET}, step=77)
    assert (reply.status, reply.known) == (pb.STATUS_OK, 40)
    assert list(reply.tree.tokens) == [1, 2, 3, 4] * 2
    assert list(reply.tree.parents) == list(range(-1, 7))
    assert set(reply.tree.sources) == {3}


def test_repeated_and_lost_messages(stream):
    stream.ask(opened("b"))
    for _ in range(2):
        (reply,) = stream.ask({"session": "b", "start": 40, "tokens": [7, 8]})
        assert (reply.status, reply.known) == (pb.STATUS_OK, 42)
    (reply,) = stream.ask({"session": "b", "start": 45, "tokens": [9]})
    assert (reply.status, reply.known) == (pb.STATUS_GAP, 42)
    (reply,) = stream.ask({"session": "b", "start": 40, "tokens": [7, 8, 9]})
    assert (reply.status, reply.known) == (pb.STATUS_OK, 43)


def test_unknown_session_beside_a_known_one(stream):
    stream.ask(opened("c"))
    replies = stream.ask({"session": "never", "tokens": [1]}, {"session": "c", "start": 40, "budget": BUDGET})
    assert [reply.status for reply in replies] == [pb.STATUS_UNKNOWN_SESSION, pb.STATUS_OK]
    assert len(replies[0].tree.tokens) == 0
    assert len(replies[1].tree.tokens) > 0


def test_closed_session_is_unknown(stream):
    stream.ask(opened("d") | {"closing": True})
    (reply,) = stream.ask({"session": "d", "start": 40, "tokens": [1]})
    assert reply.status == pb.STATUS_UNKNOWN_SESSION


def test_namespaces_do_not_see_each_other(service, stream):
    stream.ask(opened("e"))
    other = Stream(service.endpoint, NAMESPACE | {"tenant": "other"})
    (reply,) = other.ask({"session": "e", "start": 40, "budget": BUDGET})
    other.close()
    assert reply.status == pb.STATUS_UNKNOWN_SESSION


@pytest.mark.parametrize(
    ("namespace", "message"),
    [
        (None, "namespace: required in the first message"),
        ({"model": "m"}, "namespace.tokenizer: missing"),
        (
            {"model": "m", "tokenizer": "another"},
            "namespace.tokenizer: 'another', but model 'm' is served with 't'",
        ),
    ],
)
def test_namespace_preconditions(service, stream, namespace, message):
    stream.ask()  # the namespace with tokenizer t exists
    broken = Stream(service.endpoint, namespace)
    code, details = refusal(broken.ask)
    broken.close()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details.startswith(message)


def test_namespace_must_not_change_within_a_stream(stream):
    stream.ask()
    stream.ask(namespace=NAMESPACE)
    code, details = refusal(lambda: stream.ask(namespace=NAMESPACE | {"tenant": "x"}))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details.startswith("namespace: changed within the stream")


def test_a_bad_entry_is_answered_by_itself_and_names_the_field(stream):
    bad = {
        "budget.nodes: 100000 exceeds 256": {"session": "s", "budget": {"nodes": 100000}},
        "tokens[1]: 1000 is not below the vocabulary's 1000": opened("s", [1, VOCAB]),
        "opening.conversation: 300 bytes exceeds 256": {
            "session": "s",
            "opening": {"conversation": "c" * 300},
        },
        "session: 257 bytes exceeds 256": opened("s" * 257),
        "session: empty": opened(""),
        "tenant: 257 bytes exceeds 256": opened("s") | {"tenant": "t" * 257},
    }
    first, *refused, last = stream.ask(opened("good", [1, 2]), *bad.values(), opened("another", [3]))
    assert [(reply.status, reply.known, len(reply.tree)) for reply in refused] == [
        (pb.STATUS_OVER_BUDGET, 0, 0)
    ] * len(bad)
    assert [reply.refusal for reply in refused] == list(bad)
    assert [(reply.status, reply.known, reply.refusal) for reply in (first, last)] == [
        (pb.STATUS_OK, 2, ""),
        (pb.STATUS_OK, 1, ""),
    ]
    (reply,) = stream.ask({"session": "good", "start": 2, "tokens": [4]})
    assert (reply.status, reply.known) == (pb.STATUS_OK, 3)


def test_bounds_of_the_service():
    limits = ServiceLimits(message_bytes=1000, namespaces=1, streams=1)
    with running(limits, engine_limits=Limits(sessions=1)) as service:
        first = Stream(service.endpoint)
        assert [r.status for r in first.ask(opened("a"), opened("b"))] == [
            pb.STATUS_OK,
            pb.STATUS_OVER_BUDGET,
        ]
        second = Stream(service.endpoint)
        assert refusal(second.ask) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED, "Draft: the service already has 1 streams, its limit"
        )  # fmt: skip
        code, details = refusal(lambda: first.ask(opened("c", [500] * 1000)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1000" in details
        eventually(lambda: service.drafting.streams == 0)
        third = Stream(service.endpoint, NAMESPACE | {"tenant": "x"})
        code, details = refusal(third.ask)
        assert (code, details) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED, "namespace: the service already holds 1, its limit"
        )  # fmt: skip


def test_streams_that_say_nothing_make_room_for_workers(monkeypatch):
    monkeypatch.setattr(drafting, "GREETING_SECONDS", 1e9)
    with running(ServiceLimits(streams=3)) as service:
        worker = Stream(service.endpoint)
        worker.ask()
        monkeypatch.setattr(drafting, "GREETING_SECONDS", 0.01)
        silent = [Stream(service.endpoint) for _ in range(2)]
        assert {stream.call.code() for stream in silent} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert {stream.call.details() for stream in silent} == {"Draft: no message within 0.01 s"}
        eventually(lambda: service.drafting.streams == 1)
        monkeypatch.setattr(drafting, "GREETING_SECONDS", 1e9)
        late = Stream(service.endpoint)
        late.ask()
        worker.ask()
        for stream in (worker, late, *silent):
            stream.close()


def names(hosted) -> list[str]:
    return [session.name for session in hosted.engine.sessions()]


def test_sessions_outlive_a_broken_stream_for_the_grace():
    with running(ServiceLimits(grace=60.0)) as service:
        first = Stream(service.endpoint)
        first.ask(opened("kept"), opened("dropped"))
        first.close()
        second = Stream(service.endpoint)
        (reply,) = second.ask({"session": "kept", "start": 40, "budget": BUDGET})
        assert reply.status == pb.STATUS_OK
        eventually(lambda: service.drafting.streams == 1)
        (hosted,) = service.namespaces
        hosted.close_expired(time.monotonic() + 30)
        assert set(names(hosted)) == {"kept", "dropped"}
        hosted.close_expired(time.monotonic() + 60)
        assert names(hosted) == ["kept"]


def test_sessions_opened_by_a_refused_entry_or_after_a_closing_end_with_their_stream_too():
    with running(ServiceLimits(grace=0.1), engine_limits=Limits(session_tokens=50)) as service:
        stream = Stream(service.endpoint)
        replies = stream.ask(opened("gap") | {"start": 3}, opened("large", TEXT * 2))
        assert [reply.status for reply in replies] == [pb.STATUS_GAP, pb.STATUS_OVER_BUDGET]
        stream.ask(opened("again") | {"closing": True}, opened("again"))
        (hosted,) = service.namespaces
        assert names(hosted) == ["gap", "large", "again"]
        stream.close()
        eventually(lambda: names(hosted) == [])


class TestAdmin:
    @pytest.fixture
    def stub(self, service):
        with grpc.insecure_channel(service.endpoint) as channel:
            yield admin_pb2_grpc.AdminStub(channel)

    def test_warmup_then_draft_then_flush(self, service, stub):
        namespace = NAMESPACE | {"tenant": "warm"}
        documents = [{"tokens": [10, 11, 12, 13, 14, 15, 16]}, {"tokens": [20, 21]}]
        messages = [{"namespace": namespace}, {"documents": documents}]
        reply = stub.Warmup(admin_pb2.WarmupRequest(**message) for message in messages)
        assert (reply.documents, reply.tokens) == (2, 9)
        stream = Stream(service.endpoint, namespace)
        (drafted,) = stream.ask(opened("s", [9, 10, 11, 12]) | {"budget": BUDGET})
        assert list(drafted.tree.tokens)[:3] == [13, 14, 15]
        assert drafted.tree.sources[0] == 2
        live = {
            t.tier: t for t in stub.Stats(admin_pb2.StatsRequest(namespace=namespace)).namespaces[0].tiers
        }[2]
        assert (live.tokens, live.hits) == (9, 1)
        stub.Flush(admin_pb2.FlushRequest(namespace=namespace, tier=admin_pb2.TIER_LIVE))
        (drafted,) = stream.ask({"session": "s", "start": 4, "budget": BUDGET})
        assert len(drafted.tree.tokens) == 0
        stream.close()

    def test_flush_one_session(self, stream, stub):
        stream.ask(opened("f1"), opened("f2"))
        stub.Flush(admin_pb2.FlushRequest(namespace=NAMESPACE, session="f1"))
        replies = stream.ask({"session": "f1", "start": 40}, {"session": "f2", "start": 40})
        assert [reply.status for reply in replies] == [pb.STATUS_UNKNOWN_SESSION, pb.STATUS_OK]
        code, details = refusal(lambda: stub.Flush(admin_pb2.FlushRequest(namespace=NAMESPACE, session="f1")))
        assert (code, details) == (grpc.StatusCode.NOT_FOUND, "session: 'f1' is not open")

    def test_flush_one_workspace(self):
        with running(engine_limits=Limits(workspace_tokens=LEAST_TOKENS)) as service:
            stream = Stream(service.endpoint)
            said = opened("w", TEXT * 2)
            said["opening"]["workspace"] = "project"
            stream.ask(said | {"closing": True})
            with grpc.insecure_channel(service.endpoint) as channel:
                request = admin_pb2.FlushRequest(namespace=NAMESPACE, workspace="project")
                flush = functools.partial(admin_pb2_grpc.AdminStub(channel).Flush, request)
                (hosted,) = service.namespaces
                assert hosted.engine.has_workspace("project")
                flush()
                assert not hosted.engine.has_workspace("project")
                code, details = refusal(flush)
                assert (code, details) == (grpc.StatusCode.NOT_FOUND, "workspace: 'project' has no text")
            stream.close()

    @pytest.mark.parametrize(
        ("request_fields", "code", "message"),
        [
            ({}, "FAILED_PRECONDITION", "namespace.tokenizer: missing"),
            ({"namespace": NAMESPACE}, "INVALID_ARGUMENT", "target: one of tier, session, workspace or all"),
            (
                {"namespace": NAMESPACE, "tier": 1},
                "INVALID_ARGUMENT",
                "tier: live, session and rejected can be flushed",
            ),
            (
                {"namespace": NAMESPACE, "tier": 9},
                "INVALID_ARGUMENT",
                "tier: live, session and rejected can be flushed",
            ),
            (
                {"namespace": NAMESPACE, "workspace": "é" * 129},
                "INVALID_ARGUMENT",
                "workspace: 258 bytes exceeds",
            ),
            (
                {"namespace": NAMESPACE, "session": "é" * 129},
                "INVALID_ARGUMENT",
                "session: 258 bytes exceeds 256",
            ),
            ({"namespace": {"model": "x", "tokenizer": "x"}, "all": True}, "NOT_FOUND", "namespace: "),
        ],
    )
    def test_refused_flushes(self, stream, stub, request_fields, code, message):
        stream.ask()
        status, details = refusal(lambda: stub.Flush(admin_pb2.FlushRequest(**request_fields)))
        assert status.name == code
        assert details.startswith(message)

    def test_lists_sessions(self, service, stub):
        namespace = NAMESPACE | {"tenant": "listed"}
        stream = Stream(service.endpoint, namespace)
        chat = opened("chat", TEXT[:7])
        chat["opening"]["conversation"] = "c"
        stream.ask(opened("a"), chat, {"session": "chat", "start": 7, "tokens": [5, 6]})
        listed = stub.ListSessions(admin_pb2.ListSessionsRequest(namespace=namespace)).sessions
        found = [(s.session, s.tokens, s.prompt_tokens, s.conversation, s.publish) for s in listed]
        assert found == [("a", 40, 40, "", True), ("chat", 9, 7, "c", True)]
        assert all(session.bytes > 0 for session in listed)
        stream.close()

    def test_compact_leaves_one_segment_and_all_text(self, service, stub):
        namespace = NAMESPACE | {"tenant": "compacted"}
        for first in range(0, 500, 100):
            document = {"tokens": range(first, first + 100)}
            stub.Warmup(iter([admin_pb2.WarmupRequest(namespace=namespace, documents=[document])]))
        reply = stub.Compact(admin_pb2.CompactRequest(namespace=namespace))
        assert (reply.segments, reply.tokens) == (1, 500)
        stream = Stream(service.endpoint, namespace)
        (drafted,) = stream.ask(opened("s", [140, 141, 142]) | {"budget": BUDGET})
        assert drafted.tree.tokens[0] == 143
        stream.close()

    def test_a_dropped_namespace_is_gone_and_its_streams_end(self, service, stub):
        namespace = NAMESPACE | {"tenant": "dropped"}
        request = admin_pb2.DropNamespaceRequest(namespace=namespace)
        stream = Stream(service.endpoint, namespace)
        stream.ask(opened("s"))
        code, details = refusal(lambda: stub.DropNamespace(request))
        assert code is grpc.StatusCode.FAILED_PRECONDITION and "1 open sessions" in details
        stream.ask({"session": "s", "start": 40, "closing": True})
        stub.DropNamespace(request)
        tenants = [n.tenant for n in stub.ListNamespaces(admin_pb2.ListNamespacesRequest()).namespaces]
        assert "dropped" not in tenants
        code, details = refusal(lambda: stream.ask(opened("t")))
        assert code is grpc.StatusCode.FAILED_PRECONDITION and "was dropped" in details
        assert refusal(lambda: stub.DropNamespace(request))[0] is grpc.StatusCode.NOT_FOUND
        anew = Stream(service.endpoint, namespace)
        (drafted,) = anew.ask(opened("u", [1, 2]) | {"budget": BUDGET})
        assert len(drafted.tree.tokens) == 0, "nothing of the dropped text is left"
        anew.close()

    def test_a_late_second_drop_leaves_the_new_namespace_alone(self):
        with running() as service:
            stream = Stream(service.endpoint)
            stream.ask()
            (old,) = service.namespaces
            service.namespaces.drop(old)
            stream = Stream(service.endpoint)
            stream.ask()
            service.namespaces.drop(old)  # of a caller who found it before the first drop
            (new,) = service.namespaces
            assert new is not old and not new.dropped
            stream.ask()

    def test_warmup_names_the_bad_token(self, stub):
        message = {"namespace": NAMESPACE, "documents": [{"tokens": [1]}, {"tokens": [1, 2, 5000]}]}
        code, details = refusal(lambda: stub.Warmup(iter([admin_pb2.WarmupRequest(**message)])))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details == "documents[1].tokens[2]: 5000 is not below the vocabulary's 1000"

    def test_token(self):
        with running(token="secret") as service, grpc.insecure_channel(service.endpoint) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)

            def stats(*metadata):
                return stub.Stats(admin_pb2.StatsRequest(), metadata=metadata)

            for wrong in ((), (("authorization", "Bearer wrong"),), (("authorization", "secret"),)):
                assert refusal(lambda given=wrong: stats(*given))[0] is grpc.StatusCode.UNAUTHENTICATED
            assert stats(("authorization", "Bearer secret")).version


def test_remote_addresses_need_permission_and_a_token():
    maker = engine_factory(None, VOCAB)
    anywhere = parse_endpoint("0.0.0.0:0")
    with pytest.raises(ValueError, match="^listen: .*--allow-remote"):
        Service(anywhere, maker)
    with pytest.raises(ValueError, match="^admin token: it or --identities is required"):
        Service(anywhere, maker, allow_remote=True)


def test_an_unknown_namespace_is_refused_with_its_tenant_s_models_alone():
    """Any stream may ask."""
    with running() as service:
        for tenant in ("alice", "eve"):
            stream = Stream(service.endpoint, {"model": f"{tenant}'s", "tokenizer": "t", "tenant": tenant})
            stream.ask()
            stream.close()
        for tenant, known in ("eve", 'model "eve\'s"'), ("nobody", "none"):
            with grpc.insecure_channel(service.endpoint) as channel:
                namespace = {"model": "m", "tokenizer": "t", "tenant": tenant}
                message = pb.DraftRequest(namespace=namespace, existing=True)
                draft = drafting_pb2_grpc.DraftingStub(channel).Draft
                code, details = refusal(lambda draft=draft, message=message: next(draft(iter([message]))))
            assert code is grpc.StatusCode.NOT_FOUND
            assert f"tenant {tenant!r} has {known}" in details and "alice" not in details


def test_taken_port_is_an_error(service):
    with pytest.raises(OSError, match="cannot listen on .*: Address already in use"):
        Service(parse_endpoint(service.endpoint), engine_factory(None, VOCAB)).start()


def test_health_and_reflection(service):
    with grpc.insecure_channel(service.endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", DRAFTING, ADMIN):
            assert stub.Check(health_pb2.HealthCheckRequest(service=name)).status == 1
        names = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {DRAFTING, ADMIN, "grpc.health.v1.Health"} <= set(names)


UNFINISHED = ("specstore.v1.Admin/Stats", "specstore.v1.Admin/WarmupFile", "grpc.health.v1.Health/Check")
UNFINISHED += ("grpc.health.v1.Health/Watch", "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")


@pytest.mark.parametrize("method", UNFINISHED)
def test_calls_whose_request_does_not_come_hold_nobody_up(service, method):
    """Each has sent its headers, and no message: gRPC's server with threads waits for it in one of them."""
    with grpc.insecure_channel(service.endpoint) as channel, grpc.insecure_channel(service.endpoint) as other:
        end: queue.SimpleQueue = queue.SimpleQueue()
        begin = channel.stream_stream(f"/{method}")
        calls = [begin(iter(end.get, None)) for _ in range(100)]
        check = health_pb2_grpc.HealthStub(other).Check
        assert check(health_pb2.HealthCheckRequest(), timeout=60).status == 1
        admin_pb2_grpc.AdminStub(other).Stats(admin_pb2.StatsRequest(), timeout=60)
        worker = Stream(service.endpoint)
        assert worker.ask(opened("beside"))[0].status == pb.STATUS_OK
        worker.close()
        assert not any(call.done() for call in calls)
        for call in calls:
            call.cancel()
            end.put(None)


def test_warm_ups_held_open_by_their_callers_leave_threads_for_others(service):
    with grpc.insecure_channel(service.endpoint) as channel:
        begin = admin_pb2_grpc.AdminStub(channel).Warmup.future
        ends = [queue.SimpleQueue() for _ in range(10 * MAX_OPEN_CALLS)]
        calls = [begin(iter(end.get, None)) for end in ends]
        eventually(lambda: sum(call.done() for call in calls) == len(calls) - MAX_OPEN_CALLS)
        refused = [call for call in calls if call.done()]
        assert {call.code() for call in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert {call.details() for call in refused} == {
            f"Warmup: {MAX_OPEN_CALLS} such calls are open, the limit"
        }
        admin_pb2_grpc.AdminStub(channel).Stats(admin_pb2.StatsRequest(), timeout=60)
        for end in ends:
            end.put(None)
        eventually(lambda: all(call.done() for call in calls))
        again = begin(iter([admin_pb2.WarmupRequest()]))
        assert again.exception().code() is grpc.StatusCode.FAILED_PRECONDITION, (
            "admitted, without a namespace"
        )


def test_drain_answers_what_is_in_flight_and_refuses_what_comes_later(monkeypatch):
    for wait in ("DRAIN_SECONDS", "LAST_REPLY_SECONDS"):
        monkeypatch.setattr(f"datastore_service.server.service.{wait}", 60.0)
    with running() as service:
        stream = Stream(service.endpoint)
        stream.ask(opened("s"))
        (hosted,) = service.namespaces
        entered, release, step = threading.Event(), threading.Event(), hosted.engine.step

        def slow_step(entries):
            entered.set()
            assert release.wait(60)
            return step(entries)

        monkeypatch.setattr(hosted.engine, "step", slow_step)
        answers: list = []
        asking = threading.Thread(target=lambda: answers.append(stream.ask({"session": "s", "start": 40})))
        asking.start()
        assert entered.wait(60)
        stopping = threading.Thread(target=service.stop)
        stopping.start()
        with grpc.insecure_channel(service.endpoint) as channel:
            watch = health_pb2_grpc.HealthStub(channel)
            eventually(lambda: watch.Check(health_pb2.HealthCheckRequest()).status == 2)
        assert stopping.is_alive()
        release.set()
        asking.join(60)
        stopping.join(60)
        assert answers[0][0].status == pb.STATUS_OK
        assert refusal(lambda: stream.ask())[0] is grpc.StatusCode.UNAVAILABLE


def metrics_text(service) -> str:
    with serving(service) as url, urlopen(url + "metrics") as reply:
        return reply.read().decode()


def metric_values(text: str) -> dict[str, str]:
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def test_entries_over_a_limit_are_counted_beside_the_limits():
    limits = Limits(sessions=1, tokens=1000, live_tokens=500)
    with running(ServiceLimits(streams=3, namespaces=2), engine_limits=limits) as service:
        stream, names = Stream(service.endpoint), 'model="m",tenant=""'
        stream.ask(opened("a"))
        assert float(metric_values(metrics_text(service))['specstore_over_budget_total{model="m"}']) == 0
        stream.ask({"session": "a", "start": 40}, opened("b"), opened("c"))
        values = metric_values(metrics_text(service))
        stream.close()
    assert float(values['specstore_over_budget_total{model="m"}']) == 2
    assert float(values["specstore_stream_limit"]) == 3
    assert float(values["specstore_namespace_limit"]) == 2
    assert float(values[f"specstore_session_limit{{{names}}}"]) == 1
    assert float(values[f'specstore_token_limit{{{names},tier="session"}}']) == 1000
    assert float(values[f'specstore_token_limit{{{names},tier="live"}}']) == 500


def test_metrics(service, stream):
    stream.ask(opened("m") | {"budget": BUDGET})
    stream.ask({"session": "m", "start": 40, "tokens": [1, 2, 3, 99]})
    text = metrics_text(service)
    values = metric_values(text)
    labels = 'model="m",tenant="",tier="session"'
    assert float(values[f"specstore_hits_total{{{labels}}}"]) >= 1
    assert float(values[f"specstore_drafted_tokens_total{{{labels}}}"]) >= 8
    assert float(values[f"specstore_accepted_tokens_total{{{labels}}}"]) >= 3
    assert float(values[f"specstore_bytes{{{labels}}}"]) > 0
    assert float(values[f"specstore_tokens{{{labels}}}"]) >= 40
    assert float(values[f"specstore_segments{{{labels}}}"]) == 0
    assert float(values['specstore_merge_failures_total{model="m",tenant=""}']) == 0
    assert float(values['specstore_sessions{model="m",tenant=""}']) >= 1
    assert float(values['specstore_conversations{model="m",tenant=""}']) >= 0
    assert float(values["specstore_streams"]) >= 1
    assert float(values["process_resident_memory_bytes"]) > 0
    assert float(values["specstore_step_seconds_count"]) >= 2
    step, engine = (float(values[f"specstore_{part}_seconds_sum"]) for part in ("step", "engine"))
    assert 0 < engine < step
    described = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP specstore_")}
    typed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE specstore_")}
    assert described == typed
    assert all(len(line.split(maxsplit=3)) == 4 for line in text.splitlines() if line.startswith("# HELP"))


def test_a_stop_ends_what_is_left_on_the_loop(caplog):
    """A call's task that is still pending when it is collected is logged with the frames of whatever code runs then."""

    async def fails() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyError("session")

    async def left(*coroutines: Coroutine) -> list[asyncio.Task]:
        tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
        await asyncio.sleep(0)  # they begin
        return tasks

    server = RpcServer(lambda server: None, (), ())
    waits, failed = server.run(left(asyncio.Event().wait(), fails()))
    assert server.stop(grace=0, timeout=60) and waits.cancelled() and failed.done()
    assert ["KeyError: 'session'" in record.exc_text for record in caplog.records] == [True]
