"""The call Forget and its command, over a real service with a data directory."""

import json
import os

import grpc
import numpy as np
import pytest
from typer.testing import CliRunner

from datastore_service.cli.main import app
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.names import hashed_name
from datastore_service.protocol.types import Entry, Namespace, Opening
from datastore_service.server.limits import ServiceLimits
from datastore_service.storage.data_directory import DataDirectory
from datastore_service.storage.live_manifest import MANIFEST
from proto_gen.specstore.v1 import admin_pb2 as pb
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from tests.unit.server.service import VOCAB, running
from tests.unit.server.test_audit import audit, lines
from tests.unit.server.test_durability import NAMESPACE, Client, clients
from tests.unit.server.test_service import refusal
from tests.waiting import eventually

__all__ = ["audit", "clients"]
ADA, BOB = [*range(10, 40)], [*range(200, 230)]


@pytest.fixture
def service(tmp_path):
    (tmp_path / "data").mkdir()
    with running(data=DataDirectory(tmp_path / "data", VOCAB)) as service:
        yield service


def publish(client: Client, output: list[int], user: str, tenant: str = "") -> None:
    opening = {"user": hashed_name(tenant, user)}
    client.stream.ask({"session": "p", "tokens": output, "opening": opening, "closing": True})


def forget(service, *words: str) -> tuple[int, str]:
    """The command's exit status and what it prints."""
    done = CliRunner().invoke(app, ["forget", *words, "--endpoint", service.endpoint], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_a_query_finds_nothing_of_the_user_and_all_of_the_others(service, clients):
    client = clients(service)
    publish(client, ADA, "ada")
    publish(client, BOB, "bob")
    client.call("Snapshot", name="a")
    assert client.drafted(ADA[:2]) and client.drafted(BOB[:2])
    status, said = forget(service, "--subject", "user:ada", "--verify")
    assert (status, said.split("; ")[0]) == (0, "removed 2 documents, 60 tokens, from 1 namespaces")
    assert said.endswith("none of the subjects is left; looked for 1 of the texts\n")
    assert client.drafted(ADA[:2]) == [] and client.drafted(BOB[:2]) == BOB[2:10]
    client.call("Restore", name="a")
    assert client.drafted(ADA[:2]) == [] and client.drafted(BOB[:2]) == BOB[2:10]
    status, said = forget(service, "--subject", "user:ada", "--verify")
    assert (status, said.split("; ")[0]) == (0, "removed 0 documents, 0 tokens, from 1 namespaces")


def test_a_call_names_its_tenant(service, clients):
    """Its absence would be the tenant without a name, for which the caller's right was not asked."""
    client = clients(service)
    publish(client, ADA, "ada")
    with grpc.insecure_channel(service.endpoint) as channel, pytest.raises(grpc.RpcError) as refused:
        AdminStub(channel).Forget(pb.ForgetRequest(users=["ada"]), timeout=60)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith("namespace: missing")
    assert client.drafted(ADA[:2])


def test_a_subject_is_one_of_all_models_and_of_one_tenant(service, clients):
    of = [clients(service, tenant=tenant, model=model) for tenant in ("acme", "other") for model in "mn"]
    for client in of:
        publish(client, ADA, "ada", client.namespace["tenant"])
    assert forget(service, "--tenant", "acme", "--subject", "user:ada")[1].startswith("removed 2 documents")
    assert [bool(client.drafted(ADA[:2])) for client in of] == [False, False, True, True]


def test_a_name_that_a_request_gives_itself_is_a_subject_too(service, clients):
    client = clients(service)
    for number, opening in enumerate(
        ({"user": "ada"}, {"conversation": "ada"}, {"conversation": hashed_name("", "ada")})
    ):
        tokens = [number, *ADA]
        client.stream.ask({"session": "p", "tokens": tokens, "opening": opening, "closing": True})
    assert forget(service, "--subject", "user:ada")[1].startswith("removed 1 documents")
    assert forget(service, "--subject", "conversation:ada")[1].startswith("removed 2 documents")


def test_the_client_tells_the_user(service):
    datastore = GrpcDatastore(service.endpoint, Namespace(**NAMESPACE))
    assert datastore.wait_connected(60)
    text = np.array(ADA, np.int32)
    datastore.step([Entry("p", tokens=text, opening=Opening(user="ada"), closing=True)], 60)
    datastore.close()
    assert forget(service, "--subject", "user:ada")[1].startswith("removed 1 documents")


def test_what_others_have_published_too_is_told(service, clients):
    client = clients(service)
    publish(client, ADA, "ada")
    publish(client, ADA, "bob")
    status, said = forget(service, "--subject", "user:ada", "--verify")
    assert status == 0 and said.endswith("1 of them are there, since others have published the same\n")
    assert client.drafted(ADA[:2])


def test_snapshots_of_a_namespace_that_was_dropped(service, clients, tmp_path):
    client = clients(service)
    publish(client, ADA, "ada")
    publish(client, BOB, "bob")
    client.call("Snapshot", name="a")
    client.call("DropNamespace")
    client.close()
    assert forget(service, "--subject", "user:ada", "--verify")[1].startswith("removed 1 documents")
    anew = clients(service)
    anew.call("Restore", name="a")
    assert anew.drafted(ADA[:2]) == [] and anew.drafted(BOB[:2])


@pytest.mark.parametrize("left", [True, False])
def test_a_damaged_snapshot_of_a_namespace_that_was_dropped_is_named(left, service, clients, tmp_path):
    """It may be the tenant's. What can be forgotten is."""
    dropped = clients(service, model="dropped")
    publish(dropped, ADA, "ada")
    dropped.call("Snapshot", name="a")
    dropped.call("DropNamespace")
    dropped.close()
    (manifest,) = (tmp_path / "data" / "snapshots").rglob(MANIFEST)
    manifest.write_text(manifest.read_text().replace("dropped", "dripped"))
    if left:
        client = clients(service)
        publish(client, ADA, "ada")
    status, said = forget(service, "--subject", "user:ada", "--verify")
    assert status != 0 and MANIFEST in said
    if left:
        assert client.drafted(ADA[:2]) == []


def test_what_is_asked_wrongly_is_told_by_field(service, clients):
    client = clients(service)
    publish(client, ADA, "ada")
    tenant = {"tenant": ""}
    for request, message in (
        ({"namespace": NAMESPACE, "users": ["ada"]}, "namespace.model: must be empty"),
        ({"namespace": {"tokenizer": "ab"}, "users": ["ada"]}, "namespace.tokenizer: must be empty"),
        ({"namespace": tenant}, "users, conversations: at least one"),
        ({"namespace": tenant, "users": [""]}, "users: an empty name"),
        ({"namespace": tenant, "conversations": ["x" * 257]}, "conversations: 257 bytes exceeds 256"),
        (
            {"namespace": tenant, "users": ["x"] * 1025},
            "users, conversations: 1025 names in one message exceeds 1024",
        ),
    ):
        code, details = refusal(lambda request=request: client.admin.Forget(pb.ForgetRequest(**request)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and details.startswith(message), details
    nobody = pb.ForgetRequest(namespace={"tenant": "nobody"}, users=["ada"])
    assert refusal(lambda: client.admin.Forget(nobody)) == (
        grpc.StatusCode.NOT_FOUND,
        "namespace: tenant 'nobody' has none",
    )
    for subject in ("ada", "user:", "person:ada"):
        status, said = forget(service, "--subject", subject)
        assert status == 2 and "is not user:NAME or conversation:NAME" in said
    assert client.drafted(ADA[:2])


def test_the_audit_says_who_forgot_whom(service, clients, audit):
    client = clients(service)
    publish(client, ADA, "ada")
    assert forget(service, "--subject", "user:ada", "--verify")[0] == 0
    (line,) = lines(audit)
    assert line["method"].endswith("Admin/Forget") and line["code"] == "OK" and line["tenant"] == ""
    assert line["request"] == {"users": ["ada", hashed_name("", "ada")], "verify": True}
    assert line["reply"] == {"documents": 1, "tokens": 30, "namespaces": 1}


def test_old_snapshots_leave_by_themselves(tmp_path, clients):
    (tmp_path / "data").mkdir()
    data = DataDirectory(tmp_path / "data", VOCAB)
    with running(ServiceLimits(snapshot_seconds=3600), data=data) as service:
        client = clients(service)
        publish(client, ADA, "ada")
        for name in ("old", "new"):
            client.call("Snapshot", name=name)
        (manifest,) = (tmp_path / "data" / "snapshots").glob(f"*/old/{MANIFEST}")
        fields = json.loads(manifest.read_text())
        manifest.write_text(json.dumps(fields | {"created": 0}))  # damaged, and as old as the folder
        os.utime(manifest.parent, (1000, 1000))
        eventually(lambda: not manifest.parent.exists(), "it stays")
        assert [snapshot.name for snapshot in client.call("ListSnapshots").snapshots] == ["new"]
