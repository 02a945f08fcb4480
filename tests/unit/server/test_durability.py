"""The service over a data directory: restarts, snapshots, dropped namespaces, and a disk that refuses."""

import errno
import gc
import logging
import os
from urllib.request import urlopen

import grpc
import pytest
from prometheus_client import start_http_server
from typer.testing import CliRunner

from datastore_service.cli.main import app
from datastore_service.protocol.types import Namespace
from datastore_service.server import service as service_module
from datastore_service.server.admission import ADMIN
from datastore_service.storage.data_directory import DataDirectory, folder_name
from datastore_service.storage.errors import StorageError
from proto_gen.specstore.v1 import admin_pb2, admin_pb2_grpc
from proto_gen.specstore.v1 import drafting_pb2 as pb
from tests.damage import overwrite
from tests.unit.server.service import VOCAB, running
from tests.unit.server.test_service import BUDGET, Stream, refusal
from tests.waiting import eventually

NAMESPACE = {"model": "m", "tokenizer": "ab" * 32}
OUTPUT = [10, 11, 12, 13, 14]


@pytest.fixture
def start(tmp_path):
    return lambda: running(data=DataDirectory(tmp_path, VOCAB))


class Client:
    def __init__(self, service, **changes) -> None:
        self.namespace = NAMESPACE | changes
        self.stream = Stream(service.endpoint, self.namespace)
        self._channel = grpc.insecure_channel(service.endpoint)
        self.admin = admin_pb2_grpc.AdminStub(self._channel)

    def publish(self, output=OUTPUT) -> int:
        """The closing entry's status."""
        (reply,) = self.stream.ask({"session": "p", "tokens": output, "opening": {}, "closing": True})
        return reply.status

    def drafted(self, context=OUTPUT[:2]) -> list[int]:
        opening = {"prompt_length": len(context), "forbid_publish": True}
        entry = {"session": "q", "tokens": context, "opening": opening, "budget": BUDGET, "closing": True}
        return list(self.stream.ask(entry)[0].tree.tokens)

    def call(self, method: str, **fields):
        request = getattr(admin_pb2, f"{method}Request")(namespace=self.namespace, **fields)
        return getattr(self.admin, method)(request)

    def stats(self) -> admin_pb2.NamespaceStats:
        return self.call("Stats").namespaces[0]

    def close(self) -> None:
        self.stream.close()
        self._channel.close()


@pytest.fixture
def clients():
    made: list[Client] = []

    def make(service, **changes) -> Client:
        made.append(Client(service, **changes))
        return made[-1]

    yield make
    for client in made:
        client.close()


def test_namespaces_and_their_text_outlive_the_service(start, clients):
    with start() as service:
        assert clients(service).publish() == pb.STATUS_OK
        clients(service, tenant="other").publish([20, 21, 22])
    with start() as service:
        client = clients(service)
        listed = client.admin.ListNamespaces(admin_pb2.ListNamespacesRequest()).namespaces
        assert sorted((n.model, n.tenant) for n in listed) == [("m", ""), ("m", "other")]
        assert client.drafted() == OUTPUT[2:]
        assert client.drafted([20]) == []
        assert clients(service, tenant="other").drafted([20]) == [21, 22]
        assert client.stats().stored


def test_a_tokenizer_that_is_no_fingerprint_cannot_be_stored(start, clients):
    with start() as service:
        code, details = refusal(clients(service, tokenizer="t").publish)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("namespace.tokenizer: 't' is not a fingerprint")


def test_flushed_text_stays_flushed(start, clients):
    with start() as service:
        client = clients(service)
        client.publish()
        client.call("Flush", all=True)
    with start() as service:
        assert clients(service).drafted() == []


def test_a_dropped_namespace_leaves_no_text(start, clients, tmp_path):
    folder = tmp_path / "live" / folder_name(Namespace(**NAMESPACE))
    with start() as service:
        client = clients(service)
        client.publish()
        client.call("Snapshot", name="kept")
        assert folder.is_dir()
        client.call("DropNamespace")
        assert not folder.exists()
        anew = clients(service)
        assert anew.drafted() == []
        anew.publish([30, 31, 32])
    with start() as service:
        client = clients(service)
        assert (client.drafted(), client.drafted([30])) == ([], [31, 32])
        client.call("DropNamespace")
        assert client.call("Restore", name="kept").tokens == len(OUTPUT)
        assert clients(service).drafted() == OUTPUT[2:]


def test_snapshots(start, clients):
    with start() as service:
        client = clients(service)
        client.publish()
        reply = client.call("Snapshot", name="a")
        assert (reply.segments, reply.tokens) == (1, len(OUTPUT))
        client.publish([20, 21, 22])
        (info,) = client.call("ListSnapshots").snapshots
        assert (info.name, info.tokens) == ("a", len(OUTPUT))
        assert info.bytes > 0 and info.created_seconds > 1_700_000_000
        assert clients(service, tenant="other").call("ListSnapshots").snapshots == []
        client.call("Restore", name="a")
        assert (client.drafted(), client.drafted([20])) == (OUTPUT[2:], [])
    with start() as service:
        client = clients(service)
        assert (client.drafted(), client.drafted([20])) == (OUTPUT[2:], [])


@pytest.mark.parametrize(
    ("method", "fields", "code", "message"),
    [
        ("Snapshot", {"name": "a"}, "ALREADY_EXISTS", "name: there is a snapshot 'a'"),
        ("Snapshot", {"name": "../a"}, "INVALID_ARGUMENT", "name: '../a' is not 1 to 100 letters"),
        ("Snapshot", {}, "INVALID_ARGUMENT", "name: '' is not 1 to 100 letters"),
        ("Restore", {"name": "/a"}, "INVALID_ARGUMENT", "name: '/a' is not 1 to 100 letters"),
        ("Restore", {"name": "b"}, "NOT_FOUND", "name: there is no snapshot 'b'"),
    ],
)
def test_refused_snapshots(start, clients, method, fields, code, message):
    with start() as service:
        client = clients(service)
        client.publish()
        client.call("Snapshot", name="a")
        status, details = refusal(lambda: client.call(method, **fields))
        assert (status.name, details[: len(message)]) == (code, message)
        stranger = clients(service, tenant="stranger")
        assert refusal(lambda: stranger.call("Snapshot", name="a"))[0] is grpc.StatusCode.NOT_FOUND
        assert refusal(lambda: stranger.call("Restore", name="a"))[0] is grpc.StatusCode.NOT_FOUND
        assert len(client.admin.ListNamespaces(admin_pb2.ListNamespacesRequest()).namespaces) == 1


def test_a_damaged_snapshot_is_data_loss(start, clients, tmp_path):
    with start() as service:
        client = clients(service)
        client.publish()
        client.call("Snapshot", name="a")
        (path,) = (tmp_path / "snapshots").glob("*/a/*.seg")
        data = bytearray(path.read_bytes())
        data[128] ^= 1
        path.write_bytes(data)
        code, details = refusal(lambda: client.call("Restore", name="a"))
        assert code is grpc.StatusCode.DATA_LOSS
        assert details == f"{path.name}: tokens: checksum does not match, the file is damaged"


def test_each_line_of_the_log_about_a_namespace_names_its_tenant(start, clients, caplog):
    caplog.set_level(logging.INFO, "datastore_service.server")
    with start() as service:
        client = clients(service, tenant="acme")
        client.publish()
        documents = [{"tokens": OUTPUT}]
        client.admin.Warmup(iter([admin_pb2.WarmupRequest(namespace=client.namespace, documents=documents)]))
        client.call("Compact")
        client.call("Snapshot", name="a")
        client.call("Restore", name="a")
        client.call("Flush", all=True)
    with start() as service:
        clients(service, tenant="acme").call("DropNamespace")
    told = [record for record in caplog.records if hasattr(record, "model")]
    assert [getattr(record, "method", record.getMessage()) for record in told] == [
        "namespace created",
        *(f"{ADMIN}/{name}" for name in ("Warmup", "Compact", "Snapshot", "Restore", "Flush")),
        "namespace restored",
        f"{ADMIN}/DropNamespace",
    ]
    assert {(record.model, record.tenant) for record in told} == {("m", "acme")}


@pytest.mark.parametrize("damage", ["manifest", "manifest gone", "segment gone", "segment cut"])
def test_a_damaged_snapshot_hides_no_other(start, clients, tmp_path, damage):
    with start() as service:
        client = clients(service)
        client.publish()
        for name in "abc":
            client.call("Snapshot", name=name)
        (folder,) = (tmp_path / "snapshots").glob("*/b")
        (segment,) = folder.glob("*.seg")
        if damage == "segment cut":
            data = segment.read_bytes()
            segment.unlink()  # the live tier has the same file
            segment.write_bytes(data[:-1])
        elif damage == "manifest":
            (folder / "manifest.json").write_text('{"segments": 5}')
        else:
            (segment if damage == "segment gone" else folder / "manifest.json").unlink()
        found = {snapshot.name: snapshot for snapshot in client.call("ListSnapshots").snapshots}
        assert {name: bool(snapshot.damage) for name, snapshot in found.items()} == dict(
            a=False, b=True, c=False
        )
        assert (found["a"].tokens, found["b"].tokens) == (len(OUTPUT), 0)
        assert (
            found["b"].damage.startswith((f"{segment.name}: ", "manifest.json: "))
            and "/" not in found["b"].damage
        )
        arguments = ["snapshots", "--endpoint", service.endpoint, "--model", "m", "--tokenizer", "ab" * 32]
        shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}).output
        assert found["b"].damage in shown
        assert refusal(lambda: client.call("Restore", name="b"))[0] is grpc.StatusCode.DATA_LOSS
        assert client.call("Restore", name="c").tokens == len(OUTPUT)


def test_a_segment_that_changes_is_taken_out_where_all_can_see_it(start, clients, tmp_path, monkeypatch):
    monkeypatch.setattr(service_module, "CHECK_SECONDS", 0.05)
    with start() as service:
        client = clients(service)
        client.publish()
        client.call("Compact")
        client.publish([20, 21, 22])
        assert client.drafted() == OUTPUT[2:]
        (path,) = tmp_path.glob("live/*/*.seg")
        overwrite(path, 128 + 2 * 3, b"\xff\xff")  # the fourth token: none of this vocabulary
        assert 65_535 not in client.drafted()
        eventually(
            lambda: {tier.tier: tier.damaged for tier in client.stats().tiers}[admin_pb2.TIER_LIVE] == 1
        )
        assert (client.drafted(), client.drafted([20])) == ([], [21, 22])
        of_live = {"model": "m", "tenant": "", "tier": "live"}
        registry = service.metrics.registry
        assert registry.get_sample_value("specstore_damaged_segments", of_live) == 1
        assert "1 damaged segments taken out" in service.page.html()
        shown = CliRunner().invoke(app, ["stats", "--endpoint", service.endpoint], env={"COLUMNS": "200"})
        assert "1 damaged segments taken out (see the log)" in " ".join(shown.stdout.split())
    with pytest.raises(StorageError, match=f"{path.name}: tokens: checksum does not match"), start():
        pass


def test_a_segment_that_is_cut_is_taken_out_before_it_is_read(start, clients, tmp_path):
    """To read what is missing, even to compare it, would end this process."""
    with start() as service:
        client = clients(service)
        client.publish([*range(20, 500)] * 40)
        client.call("Compact")
        client.publish()
        (path,) = tmp_path.glob("live/*/*.seg")
        os.truncate(path, 4096)
        service.namespaces.check_segments()
        assert client.drafted() == OUTPUT[2:]
        assert client.drafted([20, 21]) == []
        assert {tier.tier: tier.damaged for tier in client.stats().tiers}[admin_pb2.TIER_LIVE] == 1


def test_housekeeping_finds_a_segment_that_is_cut(start, clients, tmp_path, caplog):
    with start() as service:
        client = clients(service)
        client.publish([*range(20, 500)] * 40)
        client.call("Compact")
        (path,) = tmp_path.glob("live/*/*.seg")
        os.truncate(path, 4096)
        eventually(lambda: f"segment taken out: {path}: length: the file was shortened" in caplog.text)


def test_a_segment_whose_name_has_another_file_stays(start, clients, tmp_path):
    """As after a backup is put in its place: what is mapped is whole."""
    with start() as service:
        client = clients(service)
        client.publish()
        client.call("Compact")
        (path,) = tmp_path.glob("live/*/*.seg")
        path.unlink()
        service.namespaces.check_segments()
        path.write_bytes(b"short")
        service.namespaces.check_segments()
        assert client.drafted() == OUTPUT[2:]


def test_without_a_data_directory_there_are_no_snapshots(clients):
    with running() as service:
        client = clients(service)
        client.publish()
        assert not client.stats().stored
        for method in ("Snapshot", "Restore", "ListSnapshots"):
            fields = {} if method == "ListSnapshots" else {"name": "a"}
            code, details = refusal(lambda m=method, f=fields: client.call(m, **f))
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "service with --data" in details


def metrics_of(service) -> dict[str, float]:
    server, thread = start_http_server(0, addr="127.0.0.1", registry=service.metrics.registry)
    try:
        text = urlopen(f"http://127.0.0.1:{server.server_port}/metrics").read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, value in lines}


def test_a_full_disk_is_answered_and_counted(start, clients, monkeypatch):
    write = os.write

    def full(descriptor, data):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".log"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    with start() as service:
        client = clients(service)
        client.publish()
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            assert client.publish([20, 21, 22]) == pb.STATUS_OVER_BUDGET
            assert client.drafted([20]) == []
        assert client.publish([30, 31, 32]) == pb.STATUS_OK
        assert client.stats().log_failures == 1
        assert metrics_of(service)["specstore_log_failures_total"] == 1
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
            code, details = refusal(lambda: client.call("Compact"))
            assert (code, details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "data directory: full")
    with start() as service:
        client = clients(service)
        assert (client.drafted(), client.drafted([20]), client.drafted([30])) == (OUTPUT[2:], [], [31, 32])


@pytest.mark.parametrize("call", ["Warmup", "Compact", "Snapshot"])
def test_a_disk_that_is_full_within_a_segment_is_named_so(start, clients, tmp_path, call):
    """A real device: what is written to /dev/full finds no space."""
    folder = tmp_path / "live" / folder_name(Namespace(**NAMESPACE))
    with start() as service:
        client = clients(service)
        client.publish([*range(100)] * 60)
        for number in range(1, 20):
            (folder / f"{number:08d}.seg.tmp").symlink_to("/dev/full")
        document = admin_pb2.Document(tokens=[*range(100)] * 60)
        requests = [
            admin_pb2.WarmupRequest(namespace=NAMESPACE),
            admin_pb2.WarmupRequest(documents=[document]),
        ]
        calls = {
            "Warmup": lambda: client.admin.Warmup(iter(requests)),
            "Compact": lambda: client.call("Compact"),
            "Snapshot": lambda: client.call("Snapshot", name="a"),
        }
        assert refusal(calls[call]) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED, "data directory: No space left on device"
        )  # fmt: skip
        assert client.drafted([5]) == list(range(6, 14))


def mapped_below(folder) -> list[str]:
    """Files that this process has mapped, removed ones too."""
    with open("/proc/self/maps") as lines:
        return [line for line in lines if f"{folder}/" in line]


def held(folder) -> str:
    mapped = mapped_below(folder)
    return f"mapped {mapped}; gc found {gc.collect()}; then mapped {mapped_below(folder)}"


def test_a_dropped_tenant_s_segments_are_let_go_while_a_stream_lasts(start, clients, tmp_path):
    with start() as service:
        client = clients(service)
        for tenant in TENANTS:
            output = {"session": "s", "tokens": OUTPUT, "opening": {}, "closing": True, "tenant": tenant}
            assert client.stream.ask(output)[0].status == pb.STATUS_OK
            of_tenant = NAMESPACE | {"tenant": tenant}
            client.admin.Snapshot(admin_pb2.SnapshotRequest(namespace=of_tenant, name="a"))  # seals the text
        assert len(mapped_below(tmp_path)) == len(TENANTS)
        for tenant in TENANTS:
            of_tenant = NAMESPACE | {"tenant": tenant}
            client.admin.DropNamespace(admin_pb2.DropNamespaceRequest(namespace=of_tenant))
        eventually(lambda: not mapped_below(tmp_path), lambda: held(tmp_path))
        assert client.publish() == pb.STATUS_OK, "the stream lives"


TENANTS = [f"tenant {number}" for number in range(5)]


@pytest.mark.parametrize("removed", ["the folder", "its files"])
def test_a_namespace_whose_files_were_removed_can_be_dropped(start, clients, tmp_path, removed):
    folder = tmp_path / "live" / folder_name(Namespace(**NAMESPACE))
    with start() as service:
        client = clients(service)
        client.publish()
        client.call("Snapshot", name="kept")
        client.publish([20, 21, 22])
        for file in folder.iterdir():
            file.unlink()
        if removed == "the folder":
            folder.rmdir()
        client.call("DropNamespace")
        anew = clients(service)
        assert anew.drafted() == [] and anew.publish([30, 31, 32]) == pb.STATUS_OK
        assert clients(service).call("Restore", name="kept").tokens == len(OUTPUT)
        client.call("DropNamespace")
    with start() as service:
        assert list(service.namespaces) == []


def test_what_is_answered_is_synced_in_the_background(start, clients, monkeypatch):
    monkeypatch.setattr(service_module, "SYNC_SECONDS", 0.05)
    with start() as service:
        client = clients(service)
        client.publish()
        assert client.stats().log_bytes > 0
        eventually(lambda: client.stats().log_unsynced_bytes == 0)
        assert metrics_of(service)["specstore_log_bytes"] == client.stats().log_bytes
