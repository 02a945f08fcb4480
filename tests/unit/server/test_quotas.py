"""Quotas of tenants over real gRPC: what goes beyond one is refused, and nothing that a tenant has is lost by it."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from datastore_service.cli.main import app
from datastore_service.engine.engine import Engine
from datastore_service.engine.limits import LIVE_TOKEN, Limits
from datastore_service.engine.live.merge_policy import FRESH_TOKENS
from datastore_service.engine.share import NoRoomError
from datastore_service.protocol.types import Entry, Opening, Status
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.service import Service
from datastore_service.server.tenant_use import TenantUse
from datastore_service.storage.data_directory import DataDirectory
from datastore_service.storage.errors import StorageError
from datastore_service.storage.quota_file import PARTS, QUOTAS, Quota
from proto_gen.specstore.v1 import admin_pb2
from proto_gen.specstore.v1 import drafting_pb2 as pb
from proto_gen.specstore.v1.drafting_pb2_grpc import DraftingStub
from tests.unit.server.service import VOCAB, running
from tests.unit.server.test_durability import NAMESPACE, OUTPUT, Client, clients  # noqa: F401 (a fixture)
from tests.unit.server.test_service import opened, refusal
from tests.waiting import eventually

MODELS = ("m", "another")
EACH = len(OUTPUT) + 1  # tokens that an output takes before it is sorted: a separator too
OTHERS = {
    "live_bytes": 10**9,
    "sessions": 10**6,
    "streams": 10**3,
    "outputs_per_second": 10**6,
    "messages_per_second": 10**6,
}


@pytest.fixture
def service():
    with running() as service:
        yield service


@pytest.fixture
def acme(service, clients) -> Client:  # noqa: F811
    return clients(service, tenant="acme")


def set_quota(client: Client, tenant: str = "acme", **parts: int) -> admin_pb2.SetQuotaReply:
    return client.admin.SetQuota(admin_pb2.SetQuotaRequest(tenant=tenant, **parts))


def parts_of(client: Client, tenant: str = "acme") -> dict[str, tuple[int | None, int | None, int]]:
    """Limit, used and refused of each part."""
    (quota,) = client.admin.ListQuotas(admin_pb2.ListQuotasRequest(tenant=tenant)).tenants
    assert quota.tenant == tenant
    return {
        part.name: (
            part.limit if part.HasField("limit") else None,
            part.used if part.HasField("used") else None,
            part.refused,
        )
        for part in quota.parts
    }


def told(part: str, excess: str, tenant: str = "acme") -> str:
    return f"{part}: {excess}, the quota of tenant {tenant!r}"


# Sessions


def test_sessions_are_those_of_all_namespaces_of_the_tenant(service, acme, clients):  # noqa: F811
    other_model, neighbour = clients(service, tenant="acme", model="another"), clients(service, tenant="b")
    set_quota(acme, sessions=2, **{part: OTHERS[part] for part in OTHERS if part != "sessions"})
    assert acme.stream.ask(opened("a"))[0].status == pb.STATUS_OK
    assert other_model.stream.ask(opened("a"))[0].status == pb.STATUS_OK
    for client in (acme, other_model):
        refused, known = client.stream.ask(opened("c"), {"session": "a", "start": 40, "tokens": [1]})
        assert (refused.status, refused.refusal) == (pb.STATUS_OVER_BUDGET, told("sessions", "3 exceeds 2"))
        assert known.status == pb.STATUS_OK, "the session that was open is served"
    assert [reply.status for reply in neighbour.stream.ask(*map(opened, "abcd"))] == [pb.STATUS_OK] * 4
    assert parts_of(acme)["sessions"] == (2, 2, 2)
    (later,) = acme.stream.ask({"session": "c", "start": 40, "tokens": [1]})
    assert later.status == pb.STATUS_OVER_BUDGET, "its text is not asked for again"
    assert parts_of(acme)["sessions"] == (2, 2, 2)
    other_model.stream.ask({"session": "a", "closing": True})
    assert acme.stream.ask(opened("c"))[0].status == pb.STATUS_OK
    assert parts_of(acme)["sessions"] == (2, 2, 2)


def flush_session(service: Service, client: Client) -> None:
    client.call("Flush", session="a")


def flush_all(service: Service, client: Client) -> None:
    client.call("Flush", all=True)


def close_it(service: Service, client: Client) -> None:
    client.stream.ask({"session": "a", "closing": True})


def open_with_another_text(service: Service, client: Client) -> None:
    """It takes the place of the earlier one."""
    client.stream.ask(opened("a", [9, 8, 7]))
    close_it(service, client)


def break_the_stream(service: Service, client: Client) -> None:
    client.stream.close()
    eventually(lambda: service.drafting.streams == 0, "the stream does not end")
    for hosted in service.namespaces:
        hosted.close_expired(float("inf"))


@pytest.mark.parametrize(
    "end", [flush_session, flush_all, close_it, open_with_another_text, break_the_stream]
)
def test_a_session_that_ends_makes_room_however_it_ends(service, acme, clients, end):  # noqa: F811
    set_quota(acme, sessions=1)
    assert acme.stream.ask(opened("a"), opened("b"))[0].status == pb.STATUS_OK
    end(service, acme)
    assert parts_of(acme)["sessions"] == (1, 0, 1)
    assert clients(service, tenant="acme").stream.ask(opened("c"))[0].status == pb.STATUS_OK


def test_a_lower_quota_ends_no_session(acme):
    acme.stream.ask(*map(opened, "abc"))
    set_quota(acme, sessions=1)
    assert parts_of(acme)["sessions"] == (1, 3, 0)
    replies = acme.stream.ask(*({"session": name, "start": 40, "tokens": [5]} for name in "abc"))
    assert [(reply.status, reply.known) for reply in replies] == [(pb.STATUS_OK, 41)] * 3
    assert acme.stream.ask(opened("d"))[0].refusal == told("sessions", "4 exceeds 1")
    assert acme.stream.ask(opened("a"))[0].status == pb.STATUS_OK, "sent again, it is no further one"
    set_quota(acme)
    assert acme.stream.ask(opened("d"))[0].status == pb.STATUS_OK


def test_the_namespace_s_own_limit_is_named_too(clients):  # noqa: F811
    with running(engine_limits=Limits(sessions=1)) as service:
        _, refused = clients(service).stream.ask(opened("a"), opened("b"))
        assert refused.refusal == "sessions: 1 are open in the namespace, its limit"


def test_never_more_sessions_than_the_quota_whoever_opens_at_once():
    use = TenantUse("acme")
    use.quota = Quota(sessions=3)
    engines = [Engine(VOCAB, share=use) for _ in MODELS]

    def open_some(thread: int) -> int:
        entries = [Entry(f"{thread}-{number}", opening=Opening()) for number in range(20)]
        replies = [reply for entry in entries for reply in engines[thread % 2].step([entry])]
        return sum(reply.status is Status.OK for reply in replies)

    with ThreadPoolExecutor(8) as pool:
        for times in range(1, 51):
            assert sum(pool.map(open_some, range(8))) == 3
            assert sum(len(engine.sessions()) for engine in engines) == use.used()["sessions"] == 3
            assert use.refused["sessions"] == times * (8 * 20 - 3)
            for engine in engines:
                engine.flush()
            assert use.used()["sessions"] == 0


# Streams


def test_streams_are_those_that_begin_with_the_tenant(service, acme, clients):  # noqa: F811
    set_quota(acme, streams=1)
    acme.stream.ask(opened("a"))
    assert refusal(lambda: clients(service, tenant="acme").stream.ask(opened("b"))) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        told("streams", "2 exceeds 1"),
    )
    neighbour = clients(service, tenant="b")
    of_acme = opened("c") | {"tenant": "acme"}
    assert neighbour.stream.ask(of_acme)[0].status == pb.STATUS_OK, (
        "a stream of several tenants is its first's"
    )
    assert acme.stream.ask({"session": "a", "start": 40, "tokens": [1]})[0].status == pb.STATUS_OK
    assert parts_of(acme)["streams"] == (1, 1, 1)
    acme.stream.close()
    eventually(lambda: parts_of(neighbour)["streams"] == (1, 0, 1), "the stream still counts")
    assert clients(service, tenant="acme").stream.ask(opened("b"))[0].status == pb.STATUS_OK


def test_a_refused_stream_makes_no_namespace(service, acme):
    set_quota(acme, streams=0)
    refusal(acme.stream.ask)
    assert list(service.namespaces) == []


# Live text


def test_live_text_beyond_the_quota_is_refused_and_what_was_taken_stays(service, acme, clients):  # noqa: F811
    other_model, neighbour = clients(service, tenant="acme", model="another"), clients(service, tenant="b")
    set_quota(acme, live_bytes=2 * EACH * LIVE_TOKEN)
    assert acme.publish() == other_model.publish([20, 21, 22, 23, 24]) == pb.STATUS_OK
    for client in (acme, other_model):
        entry = {"session": "p", "tokens": [30, 31], "opening": {}, "closing": True}
        (reply,) = client.stream.ask(entry)
        beyond = f"{(2 * EACH + 3) * LIVE_TOKEN} exceeds {2 * EACH * LIVE_TOKEN}"
        assert (reply.status, reply.refusal) == (pb.STATUS_OVER_BUDGET, told("live_bytes", beyond))
        assert client.drafted([30]) == []
        assert client.call("ListSessions").sessions == [], "the session has ended all the same"
    assert acme.drafted() == OUTPUT[2:] and other_model.drafted([20]) == [21, 22, 23, 24]
    assert neighbour.publish() == pb.STATUS_OK
    assert parts_of(acme)["live_bytes"] == (2 * EACH * LIVE_TOKEN, 2 * EACH * LIVE_TOKEN, 2)
    other_model.call("Flush", tier=admin_pb2.TIER_LIVE)
    assert acme.publish([30, 31, 32]) == pb.STATUS_OK


def test_what_is_forgotten_makes_room(service, acme, clients):  # noqa: F811
    other_model = clients(service, tenant="acme", model="another")
    set_quota(acme, live_bytes=2 * EACH * LIVE_TOKEN)
    for client, user in ((acme, "ada"), (other_model, "bob")):
        client.stream.ask({"session": "p", "tokens": OUTPUT, "opening": {"user": user}, "closing": True})
    assert acme.publish() == pb.STATUS_OVER_BUDGET
    request = {"namespace": {"tenant": "acme"}, "users": ["ada"]}
    assert acme.admin.Forget(admin_pb2.ForgetRequest(**request)).tokens == len(OUTPUT)
    assert parts_of(acme)["live_bytes"][1] <= EACH * LIVE_TOKEN
    assert acme.publish() == pb.STATUS_OK
    assert acme.publish() == pb.STATUS_OVER_BUDGET


def test_what_has_its_greatest_age_makes_room(monkeypatch):
    now = [1000.0]
    use = TenantUse("acme")
    use.quota = Quota(live_bytes=EACH * LIVE_TOKEN)
    engine = Engine(VOCAB, limits=Limits(live_seconds=100), share=use)
    use.count_text_of(engine)
    for part in (engine._live, engine._live._compactor):
        monkeypatch.setattr(part, "_clock", lambda: now[0])

    def publish() -> Status:
        entry = Entry("s", tokens=np.array(OUTPUT, np.int32), opening=Opening(), closing=True)
        return engine.step([entry])[0].status

    assert [publish(), publish()] == [Status.OK, Status.OVER_BUDGET]
    now[0] = 1101.0
    engine.expire()
    engine.settle()
    assert use.used()["live_bytes"] == 0
    assert [publish(), publish()] == [Status.OK, Status.OVER_BUDGET]


def test_an_output_of_exactly_the_rest_is_taken(acme):
    set_quota(acme, live_bytes=EACH * LIVE_TOKEN)
    assert acme.publish() == pb.STATUS_OK
    set_quota(acme, live_bytes=2 * EACH * LIVE_TOKEN - 1)
    assert acme.publish() == pb.STATUS_OVER_BUDGET


def test_a_warm_up_beyond_the_quota_is_refused(acme):
    def warm(count: int) -> admin_pb2.WarmupReply:
        request = admin_pb2.WarmupRequest(namespace=acme.namespace, documents=[{"tokens": [7] * count}])
        return acme.admin.Warmup(iter([request]))

    set_quota(acme, live_bytes=100 * LIVE_TOKEN)
    assert warm(60).tokens == 60
    assert refusal(lambda: warm(41)) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        told("live_bytes", f"{101 * LIVE_TOKEN} exceeds {100 * LIVE_TOKEN}"),
    )
    assert warm(40).tokens == 40
    assert parts_of(acme)["live_bytes"] == (100 * LIVE_TOKEN, 100 * LIVE_TOKEN, 1)


def test_a_lower_quota_deletes_no_text(acme):
    acme.publish()
    set_quota(acme, live_bytes=0)
    assert acme.publish([20, 21]) == pb.STATUS_OVER_BUDGET
    assert acme.drafted() == OUTPUT[2:]


def test_never_more_text_than_the_quota_whoever_publishes_at_once():
    use = TenantUse("acme")
    use.quota = Quota(live_bytes=2 * FRESH_TOKENS * LIVE_TOKEN)
    engines = [Engine(VOCAB, share=use) for _ in MODELS]
    for engine in engines:
        use.count_text_of(engine)
    output, taken = np.full(999, 7, dtype=np.int32), []

    def publish(thread: int) -> None:
        for number in range(40):
            entry = Entry(f"{thread}-{number}", tokens=output, opening=Opening(), closing=True)
            (reply,) = engines[number % 2].step([entry])
            taken.append(reply.status is Status.OK)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(publish, range(8)))
    for engine in engines:
        engine.settle()
    assert sum(engine.live_tokens for engine in engines) * LIVE_TOKEN <= 2 * FRESH_TOKENS * LIVE_TOKEN
    texts = sum(engine.live_tokens // 999 for engine in engines)
    assert texts == sum(taken) == 8 * 40 - use.refused["live_bytes"] > 100


def test_text_on_its_way_counts_until_it_is_there():
    use = TenantUse("acme")
    use.quota = Quota(live_bytes=100 * LIVE_TOKEN)
    with use.adding(60):
        with pytest.raises(NoRoomError), use.adding(41):
            pass
        with use.adding(40):
            pass
    with use.adding(100):
        pass


# Outputs a second


def test_outputs_of_a_second_may_come_at_once_and_no_more():
    now = [100.0]
    use = TenantUse("acme", lambda: now[0])
    use.quota = Quota(outputs_per_second=4)

    def taken(asked: int) -> int:
        before = use.refused["outputs_per_second"]
        for _ in range(asked):
            try:
                with use.adding(5, outputs=1):
                    pass
            except NoRoomError as error:
                assert str(error) == told("outputs_per_second", "more than 4")
        return asked - (use.refused["outputs_per_second"] - before)

    assert taken(5) == 4
    now[0] += 0.25
    assert taken(5) == 1
    now[0] += 1000
    assert taken(5) == 4, "what was not used in a second is lost"
    with use.adding(10**6):
        pass  # documents are no outputs


def test_an_output_beyond_the_rate_is_not_published_and_the_next_message_is_answered(acme):
    acme.publish()
    set_quota(acme, outputs_per_second=0)
    entry = {"session": "p", "tokens": [20, 21], "opening": {}, "closing": True}
    (reply,) = acme.stream.ask(entry)
    assert (reply.status, reply.refusal) == (
        pb.STATUS_OVER_BUDGET,
        told("outputs_per_second", "more than 0"),
    )
    kept_back = entry | {"opening": {"forbid_publish": True}}
    assert acme.stream.ask(kept_back)[0].status == pb.STATUS_OK, "it is no output of the live tier"
    assert acme.drafted() == OUTPUT[2:] and acme.drafted([20]) == []
    assert parts_of(acme)["outputs_per_second"] == (0, None, 1)


# Messages a second


def test_messages_of_a_second_may_come_at_once_and_further_ones_wait_in_turn():
    now = [100.0]
    use = TenantUse("acme", lambda: now[0])
    assert use.turn() == 0
    use.quota = Quota(messages_per_second=4)
    assert [use.turn() for _ in range(6)] == [0, 0, 0, 0, 0.25, 0.5]
    now[0] += 0.5
    assert use.turn() == 0.25, "two others go before it"
    now[0] += 1000
    assert [use.turn() for _ in range(5)] == [0, 0, 0, 0, 0.25]
    assert use.refused["messages_per_second"] == 4


def test_a_message_beyond_the_rate_is_answered_later(acme, clients, service):  # noqa: F811
    neighbour, second = clients(service, tenant="b"), clients(service, tenant="acme")
    set_quota(acme, messages_per_second=20)
    acme.stream.ask(opened("a"))
    second.stream.ask(opened("b"))
    began = time.monotonic()
    for at in range(20):
        for client, name in ((acme, "a"), (second, "b")):
            entry = {"session": name, "start": 40 + at, "tokens": [5]}
            assert client.stream.ask(entry)[0].status == pb.STATUS_OK
    assert time.monotonic() - began >= 0.99 * (40 - 20) / 20
    neighbour.stream.ask(opened("a"))
    waited = parts_of(neighbour)["messages_per_second"]
    set_quota(neighbour, "b", messages_per_second=10**6)
    assert waited[:2] == (20, None) and parts_of(neighbour, "b")["messages_per_second"] == (10**6, None, 0)


def test_a_rate_of_no_message_is_refused(acme):
    assert refusal(lambda: set_quota(acme, messages_per_second=0)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "messages_per_second: 0 is below 1",
    )


# Set, kept and shown


@pytest.fixture
def start(tmp_path) -> Callable:
    return lambda: running(data=DataDirectory(tmp_path, VOCAB))


def test_quotas_outlive_the_service_and_hold_for_its_stored_text(start, clients):  # noqa: F811
    with start() as service:
        client = clients(service, tenant="acme")
        client.publish()
        assert set_quota(client, live_bytes=EACH * LIVE_TOKEN, sessions=7).stored
        assert set_quota(client, "gone", streams=1).stored
        set_quota(client, "gone")
    with start() as service:
        client = clients(service, tenant="acme")
        assert {part: limit for part, (limit, _, _) in parts_of(client).items()} == {
            "live_bytes": EACH * LIVE_TOKEN,
            "sessions": 7,
            "streams": None,
            "outputs_per_second": None,
            "messages_per_second": None,
        }
        listed = client.admin.ListQuotas(admin_pb2.ListQuotasRequest()).tenants
        assert [each.tenant for each in listed] == ["acme"]
        assert client.publish([20, 21]) == pb.STATUS_OVER_BUDGET


def test_a_quota_that_cannot_be_stored_is_not_in_force(start, clients, monkeypatch):  # noqa: F811
    with start() as service:
        client = clients(service, tenant="acme")
        set_quota(client, sessions=7)
        with monkeypatch.context() as full:
            full.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
            assert refusal(lambda: set_quota(client, sessions=1)) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "data directory: No space left",
            )
        assert parts_of(client)["sessions"] == (7, 0, 0)
    with start() as service:
        assert parts_of(clients(service, tenant="acme"))["sessions"] == (7, 0, 0)


def test_a_damaged_file_stops_the_start_and_is_named(start, clients, tmp_path):  # noqa: F811
    with start() as service:
        set_quota(clients(service), sessions=7)
    path = tmp_path / QUOTAS
    path.write_text(path.read_text().replace("7", "8", 1))
    with pytest.raises(StorageError, match=r"quotas\.json: checksum: does not match"):
        DataDirectory(tmp_path, VOCAB)


def test_without_a_data_directory_it_says_that_nothing_is_kept(acme):
    assert not set_quota(acme, sessions=1).stored


def test_a_quota_needs_a_tenant_of_which_there_may_be_many(clients):  # noqa: F811
    with running(ServiceLimits(quotas=2)) as service:
        client = clients(service)
        for request in (admin_pb2.SetQuotaRequest(sessions=1), admin_pb2.SetQuotaRequest()):
            assert refusal(lambda request=request: client.admin.SetQuota(request)) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                'tenant: missing; "" is the tenant without a name',
            )
        assert refusal(lambda: set_quota(client, "x" * 300, sessions=1)) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "tenant: 300 bytes exceeds 256",
        )
        for tenant in ("a", "b", "b", ""):
            if tenant:
                set_quota(client, tenant, sessions=1)
        assert refusal(lambda: set_quota(client, "", sessions=1)) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "tenant: 2 tenants have a quota, the limit",
        )
        set_quota(client, "a")
        set_quota(client, "", sessions=1)
        assert parts_of(client, "")["sessions"][0] == 1


def test_nothing_is_kept_of_a_tenant_that_has_nothing(service, clients):  # noqa: F811
    """Callers choose names."""
    client = clients(service, tenant="b")
    client.stream.ask(opened("a"))
    draft = DraftingStub(client.stream.channel).Draft
    for number in range(20):
        named = pb.DraftRequest(namespace=NAMESPACE | {"tenant": f"stranger {number}"}, existing=True)
        assert refusal(lambda named=named: list(draft(iter([named]))))[0] is grpc.StatusCode.NOT_FOUND
        parts_of(client, f"asked {number}")

    def known() -> list[str]:
        gc.collect()  # does nothing while another thread's goes on
        return [use.tenant for use in service.namespaces.quotas]

    eventually(lambda: known() == ["b"], "tenants that have nothing are known")


def test_what_is_refused_is_counted_for_prometheus(service, acme):
    set_quota(acme, sessions=1, outputs_per_second=5)
    acme.stream.ask(*map(opened, "abc"))
    page = generate_latest(service.metrics.registry).decode()
    told = {
        (sample.name, sample.labels["quota"]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.labels.get("tenant") == "acme" and "quota" in sample.labels
    }
    assert told == {
        ("specstore_quota", "sessions"): 1,
        ("specstore_quota", "outputs_per_second"): 5,
        ("specstore_quota_used", "sessions"): 1,
        ("specstore_quota_refusals_total", "sessions"): 2,
        ("specstore_quota_refusals_total", "outputs_per_second"): 0,
    }
    assert set(PARTS) == set(OTHERS)


# The command


@pytest.fixture
def run(service) -> Callable:
    return lambda *words: CliRunner().invoke(app, ["quota", *words, "--endpoint", service.endpoint])


def test_the_command_sets_and_shows(run, acme, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    acme.stream.ask(opened("a"))
    done = run("set", "--tenant", "acme", "--sessions", "1", "--live-bytes", "6000")
    assert done.stdout == (
        "tenant 'acme': live_bytes 6,000, sessions 1; until the service ends, which has no data directory\n"
    )
    acme.stream.ask(opened("b"))
    shown = [line.split() for line in run("show", "--tenant", "acme").stdout.splitlines()]
    assert ["│", "acme", "│", "sessions", "│", "1", "│", "1", "│", "1", "│"] in shown
    (listed,) = json.loads(run("--json").stdout)["tenants"]
    assert listed["parts"][1] == {"name": "sessions", "limit": "1", "used": "1", "refused": "1"}
    assert run("set", "--tenant", "acme").stdout.startswith("tenant 'acme': no quota; ")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("set", "--sessions", "1"), 'specstore: quota: set needs --tenant, which may be ""'),
        (("show", "--live-bytes", "1"), "specstore: quota: --live-bytes is for `specstore quota set`"),
        (
            ("set", "--tenant", "a", "--streams", "-1"),
            "'--streams': Input should be greater than or equal to 0",
        ),
        (
            ("set", "--tenant", "a", "--streams", str(2**64)),
            "'--streams': Input should be less than or equal to 18446744073709551615",
        ),
    ],
)
def test_a_wrong_argument_of_the_command_is_one_line(run, words, line):
    done = run(*words)
    assert done.exit_code == 2 and line in done.stderr and done.stderr.count("\n") == 1
