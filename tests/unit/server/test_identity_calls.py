"""Who may call what: each identity with each call of the service, over real TLS."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import urlopen

import grpc
import numpy as np
import pytest
import trustme
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from datastore_service.client.access import Access, Metadata
from datastore_service.client.channel import open_channel
from datastore_service.engine.limits import Limits
from datastore_service.protocol.types import Namespace
from datastore_service.server.admission import ADMIN, DRAFTING, NEEDS
from datastore_service.server.credentials import watched_tls
from datastore_service.server.identities import token_digest
from datastore_service.server.identity_file import watched_table
from datastore_service.server.service import Service
from datastore_service.storage.data_directory import DataDirectory
from datastore_service.tls import Tls, client_tls
from proto_gen.specstore.v1 import admin_pb2 as pb
from proto_gen.specstore.v1.drafting_pb2 import DraftRequest
from tests.unit.certificates import issue, issue_named
from tests.unit.server.identity_files import JWT_SECTION, Issuer, put, write_keys
from tests.unit.server.service import VOCAB, running, serving

SECONDS = 60.0
READER, OPERATOR, LENDER = "reader-0123456789", "operator-0123456789", "lender-0123456789"
HEALTH, REFLECTION = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"

TABLE = f"""{JWT_SECTION}
[identities.engine]
certificates = ["uri:spiffe://example/engine/*"]
draft = ["acme"]
publish = ["acme"]

[identities.reader]
tokens = ["sha256:{token_digest(READER)}"]
draft = ["acme"]
read = ["acme"]

[identities.feeder]
claims = {{ sub = "feeder" }}
publish = ["acme"]

[identities.operator]
token_files = ["operator"]
read = ["*"]
administer = ["*"]
forget = ["acme"]

[identities.lender]
tokens = ["sha256:{token_digest(LENDER)}"]
quota = ["acme"]
"""

# For the tenant acme, then for another: + allowed, - PERMISSION_DENIED, 0 UNAUTHENTICATED, x UNIMPLEMENTED.
WHO = ("engine", "reader", "feeder", "operator", "lender", "a wrong token", "an expired JWT", "nobody")
MATRIX = {
    #                                                 engine reader feeder operator lender wrong expired nobody
    f"{DRAFTING}/Draft":                             ("+-", "+-", "--", "--", "--", "00", "00", "00"),
    f"{ADMIN}/Warmup":                               ("+-", "--", "+-", "--", "--", "00", "00", "00"),
    f"{ADMIN}/Stats":                                ("--", "+-", "--", "++", "--", "00", "00", "00"),
    f"{ADMIN}/ListNamespaces":                       ("--", "++", "--", "++", "--", "00", "00", "00"),
    f"{ADMIN}/ListSessions":                         ("--", "+-", "--", "++", "--", "00", "00", "00"),
    f"{ADMIN}/ListSnapshots":                        ("--", "+-", "--", "++", "--", "00", "00", "00"),
    f"{ADMIN}/ListQuotas":                           ("--", "+-", "--", "++", "--", "00", "00", "00"),
    f"{ADMIN}/SetQuota":                             ("--", "--", "--", "--", "+-", "00", "00", "00"),
    f"{ADMIN}/WarmupFile":                           ("--", "--", "--", "++", "--", "00", "00", "00"),
    f"{ADMIN}/Flush":                                ("--", "--", "--", "++", "--", "00", "00", "00"),
    f"{ADMIN}/Epoch":                                ("--", "--", "--", "++", "--", "00", "00", "00"),
    f"{ADMIN}/Compact":                              ("--", "--", "--", "++", "--", "00", "00", "00"),
    f"{ADMIN}/DropNamespace":                        ("--", "--", "--", "++", "--", "00", "00", "00"),
    f"{ADMIN}/Snapshot":                             ("--", "--", "--", "++", "--", "00", "00", "00"),
    f"{ADMIN}/Restore":                              ("--", "--", "--", "++", "--", "00", "00", "00"),
    f"{ADMIN}/Forget":                               ("--", "--", "--", "+-", "--", "00", "00", "00"),
    f"{HEALTH}/Check":                               ("++", "++", "++", "++", "++", "++", "++", "++"),
    f"{HEALTH}/List":                                ("xx", "xx", "xx", "xx", "xx", "xx", "xx", "xx"),
    f"{HEALTH}/Watch":                               ("++", "++", "++", "++", "++", "++", "++", "++"),
    f"{REFLECTION}/ServerReflectionInfo":            ("++", "++", "++", "++", "++", "00", "00", "00"),
}  # fmt: skip
CODES = {
    "+": grpc.StatusCode.OK,
    "-": grpc.StatusCode.PERMISSION_DENIED,
    "0": grpc.StatusCode.UNAUTHENTICATED,
    "x": grpc.StatusCode.UNIMPLEMENTED,
}
CELLS = [
    (method, who, tenant, CODES[outcomes[tenant == "other"]])
    for method, row in MATRIX.items()
    for who, outcomes in zip(WHO, row, strict=True)
    for tenant in ("acme", "other")
]
REQUESTS: dict[str, Callable[[dict], Message]] = {
    "Draft": lambda ns: DraftRequest(step=1, namespace=ns),
    "Warmup": lambda ns: pb.WarmupRequest(namespace=ns, documents=[{"tokens": [1, 2]}]),
    "Stats": lambda ns: pb.StatsRequest(namespace=ns),
    "ListNamespaces": lambda ns: pb.ListNamespacesRequest(),
    "ListSessions": lambda ns: pb.ListSessionsRequest(namespace=ns),
    "ListQuotas": lambda ns: pb.ListQuotasRequest(tenant=ns["tenant"]),
    "SetQuota": lambda ns: pb.SetQuotaRequest(tenant=ns["tenant"], sessions=100),
    "ListSnapshots": lambda ns: pb.ListSnapshotsRequest(namespace=ns),
    "WarmupFile": lambda ns: pb.WarmupFileRequest(namespace=ns, file="ids.npy"),
    "Flush": lambda ns: pb.FlushRequest(namespace=ns, all=True),
    "Epoch": lambda ns: pb.EpochRequest(namespace=ns, keep=1),
    "Compact": lambda ns: pb.CompactRequest(namespace=ns),
    "DropNamespace": lambda ns: pb.DropNamespaceRequest(namespace=ns),
    "Snapshot": lambda ns: pb.SnapshotRequest(namespace=ns, name=uuid.uuid4().hex),
    "Restore": lambda ns: pb.RestoreRequest(namespace=ns, name="kept"),
    "Forget": lambda ns: pb.ForgetRequest(namespace={"tenant": ns["tenant"]}, users=["ada"], verify=True),
    "Check": lambda ns: health_pb2.HealthCheckRequest(),
    "List": lambda ns: health_pb2.HealthListRequest(),
    "Watch": lambda ns: health_pb2.HealthCheckRequest(),
    "ServerReflectionInfo": lambda ns: reflection_pb2.ServerReflectionRequest(list_services=""),
}


class House:
    """A service with a table, and what its callers show."""

    def __init__(self, service: Service, tls: dict[str, Tls | None], tokens: dict[str, str]) -> None:
        self.service, self._tls, self._tokens = service, tls, tokens

    def channel(self, who: str) -> grpc.Channel:
        return open_channel(self.service.endpoint, self._tls.get(who, self._tls["nobody"]))

    def metadata(self, who: str) -> Metadata:
        return Access(token=self._tokens.get(who, "")).metadata

    def code(self, method: str, who: str, tenant: str) -> tuple[grpc.StatusCode, str]:
        """What becomes of a call for a tenant that is there."""
        self.service.namespaces.open(namespace(tenant))
        with self.channel(who) as channel:
            return outcome(channel, method, vars_of(namespace(tenant)), self.metadata(who))


def namespace(tenant: str) -> Namespace:
    return Namespace("m", "0" * 64, tenant)


def vars_of(namespace: Namespace) -> dict[str, str]:
    return {"model": namespace.model, "tokenizer": namespace.tokenizer, "tenant": namespace.tenant}


def outcome(
    channel: grpc.Channel, method: str, named: dict[str, str], metadata: Metadata
) -> tuple[grpc.StatusCode, str]:
    """The status of a call, whatever its kind. Watch, which would go on, is left after its first reply."""
    service, _, name = method.partition("/")
    described = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
    kinds = {False: "unary", True: "stream"}
    make = getattr(channel, f"{kinds[described.client_streaming]}_{kinds[described.server_streaming]}")
    reply = message_factory.GetMessageClass(described.output_type)
    call = make(f"/{method}", lambda message: message.SerializeToString(), reply.FromString)
    request: Any = REQUESTS[name](named)
    if described.client_streaming:
        request = iter([request])
    try:
        replied = call(request, timeout=SECONDS, metadata=metadata)
        if described.server_streaming:
            next(replied)
        if described.server_streaming and name != "Watch":
            list(replied)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Iterator[House]:
    folder, authority, issuer = tmp_path_factory.mktemp("house"), trustme.CA(), Issuer()
    own = issue(folder, authority, "service")
    write_keys(folder / "keys.json", issuer)
    put(folder / "operator", OPERATOR)
    (folder / "corpora").mkdir()
    np.save(folder / "corpora" / "ids.npy", np.arange(9))
    engine = issue_named(folder, authority, "engine", "spiffe://example/engine/7")
    tls = {
        name: client_tls(own.ca, files.certificate, files.key)
        for name, files in (("engine", engine), ("nobody", issue(folder, authority, "nobody")))
    }
    tokens = {
        "reader": READER,
        "operator": OPERATOR,
        "lender": LENDER,
        "feeder": issuer.token("feeder"),
        "a wrong token": "wrong-0123456789",
        "an expired JWT": issuer.token("feeder", seconds=-3600),
    }
    with running(
        tls=watched_tls(own.certificate, own.key, own.ca),
        table=watched_table(put(folder / "identities.toml", TABLE)),
        data=DataDirectory(folder, VOCAB),
        corpora=folder / "corpora",
        engine_limits=Limits(live_tokens=1 << 16),
    ) as service:
        for tenant in ("acme", "other"):
            hosted = service.namespaces.open(namespace(tenant))
            hosted.engine.warmup([np.arange(50, dtype=np.int32)])
            hosted.engine.snapshot("kept")
        yield House(service, tls, tokens)


def test_each_call_of_the_service_has_a_row(house):
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with house.channel("operator") as channel:
        call = channel.stream_stream(
            f"/{REFLECTION}/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        told = next(call(iter([request]), timeout=SECONDS, metadata=house.metadata("operator")))
    names = [service.name for service in told.list_services_response.service]
    calls = {
        f"{name}/{method.name}"
        for name in names
        for method in descriptor_pool.Default().FindServiceByName(name).methods
    }
    assert calls == set(MATRIX)
    assert set(NEEDS) == {method for method, row in MATRIX.items() if set(row) != {"xx"}}


@pytest.mark.parametrize(("method", "who", "tenant", "code"), CELLS)
def test_each_identity_with_each_call(house, method, who, tenant, code):
    assert house.code(method, who, tenant)[0] is code


@pytest.mark.parametrize("who", WHO)
def test_a_refusal_names_what_is_missing_and_nothing_else(house, who):
    told = {
        "engine": "administer: identity 'engine' may not administer tenant 'acme'",
        "reader": "administer: identity 'reader' may not administer tenant 'acme'",
        "feeder": "administer: identity 'feeder' may not administer tenant 'acme'",
        "operator": "",
        "lender": "administer: identity 'lender' may not administer tenant 'acme'",
        "a wrong token": "authorization: a token that the service does not know",
        "an expired JWT": "authorization: the JWT has expired",
        "nobody": "authorization: no token, and no name of the certificate is an identity's",
    }
    assert house.code(f"{ADMIN}/Flush", who, "acme")[1] == told[who]


def test_a_refusal_does_not_tell_whether_a_tenant_is_there(house):
    there = house.code(f"{ADMIN}/Stats", "reader", "other")
    with house.channel("reader") as channel:
        absent = outcome(channel, f"{ADMIN}/Stats", vars_of(namespace("absent")), house.metadata("reader"))
    assert absent == (there[0], there[1].replace("other", "absent"))


def test_a_wrong_token_is_not_made_up_for_by_the_certificate(house):
    with house.channel("engine") as channel:
        code, _ = outcome(
            channel, f"{DRAFTING}/Draft", vars_of(namespace("acme")), Access(token="x" * 20).metadata
        )
    assert code is grpc.StatusCode.UNAUTHENTICATED


def test_two_tokens_are_refused(house):
    twice = house.metadata("reader") + house.metadata("operator")
    with house.channel("reader") as channel:
        told = outcome(channel, f"{ADMIN}/Stats", vars_of(namespace("acme")), twice)
    assert told == (grpc.StatusCode.UNAUTHENTICATED, "authorization: given twice")


def test_lists_have_what_the_caller_may_read(house):
    for tenant in ("acme", "other"):
        house.service.namespaces.open(namespace(tenant))
    for who, tenants in (("reader", {"acme"}), ("operator", {"acme", "other"})):
        with house.channel(who) as channel:
            stub = AdminCalls(channel, house.metadata(who))
            assert {each.tenant for each in stub.ListNamespaces().namespaces} == tenants
            assert {each.namespace.tenant for each in stub.Stats().namespaces} == tenants


class AdminCalls:
    """Calls without arguments."""

    def __init__(self, channel: grpc.Channel, metadata: Metadata) -> None:
        from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub

        self._stub, self._metadata = AdminStub(channel), metadata

    def __getattr__(self, name: str) -> Callable[[], Any]:
        request = getattr(pb, f"{name}Request")()
        return lambda: getattr(self._stub, name)(request, timeout=SECONDS, metadata=self._metadata)


def test_a_call_without_a_row_is_not_served(house, monkeypatch):
    monkeypatch.delitem(NEEDS, f"{ADMIN}/Compact")
    assert house.code(f"{ADMIN}/Compact", "operator", "acme")[0] is grpc.StatusCode.UNIMPLEMENTED


def test_the_metrics_port_asks_nobody(house):
    with serving(house.service) as url:
        assert b"specstore_streams" in urlopen(f"{url}metrics", timeout=SECONDS).read()
        assert urlopen(url, timeout=SECONDS).status == 200


def test_many_callers_at_once_are_told_apart(house):
    """A call's identity is its own, whichever thread answers it."""
    callers = list(itertools.islice(itertools.cycle(("reader", "operator")), 64))

    def tenants(who: str) -> set[str]:
        with house.channel(who) as channel:
            stub = AdminCalls(channel, house.metadata(who))
            return {each.tenant for each in stub.ListNamespaces().namespaces}

    for tenant in ("acme", "other"):
        house.service.namespaces.open(namespace(tenant))
    with ThreadPoolExecutor(16) as pool:
        for who, seen in zip(callers, pool.map(tenants, callers), strict=True):
            assert seen == ({"acme"} if who == "reader" else {"acme", "other"})
