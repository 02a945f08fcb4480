import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from datastore_service import client
from datastore_service.client import Access, open_datastore, open_postbox, read_token
from datastore_service.client.embedded import EmbeddedDatastore
from datastore_service.client.metrics import DAMAGED_TREES
from datastore_service.client.remote import GrpcDatastore
from datastore_service.client.resilient import ResilientDatastore
from datastore_service.engine.segment import build_segment
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening
from datastore_service.server.identities import token_digest
from datastore_service.server.identity_file import watched_table
from datastore_service.storage.errors import StorageError
from datastore_service.storage.manifest import Manifest, write_manifest
from datastore_service.storage.segment_file import SUFFIX, write_segment
from tests.unit.server.identity_files import put
from tests.unit.server.service import running
from tests.waiting import eventually

NAMESPACE = Namespace("m", "a" * 64)
SECONDS = 60.0


@pytest.fixture
def prior(tmp_path):
    name = "000000" + SUFFIX
    write_segment(tmp_path / name, build_segment([np.arange(10, 40)], 100), NAMESPACE.tokenizer)
    write_manifest(tmp_path, Manifest(NAMESPACE.tokenizer, 100, (name,)))
    return str(tmp_path)


def first_token(datastore) -> int:
    entry = Entry("s", tokens=np.arange(15, 20, dtype=np.int32), budget=Budget(4), opening=Opening())
    (reply,) = datastore.step([entry], SECONDS)
    datastore.close()
    return int(reply.tree.tokens[0]) if len(reply.tree) else -1


def test_embedded(prior):
    plain = open_datastore("embedded", NAMESPACE, 100)
    assert isinstance(plain, EmbeddedDatastore)
    assert first_token(plain) == -1
    assert first_token(open_datastore(f"embedded:{prior}", NAMESPACE, 100)) == 20
    assert first_token(open_datastore("embedded", NAMESPACE, 100, prior=prior)) == 20


def test_a_prior_of_another_tokenizer_is_refused(prior):
    with pytest.raises(StorageError, match="tokenizer: built with"):
        open_datastore("embedded", Namespace("m", "b" * 64), 100, prior=prior)


def test_service():
    with running() as service:
        datastore = open_datastore(service.endpoint, NAMESPACE, 100)
        assert isinstance(datastore, ResilientDatastore)
        datastore.close()


def test_a_start_waits_two_seconds_for_all_its_services_and_goes_on_without_them(monkeypatch, caplog):
    clock, waits = SimpleNamespace(now=100.0), []

    def wait(self, seconds):
        waits.append(seconds)
        clock.now += min(seconds, 1.5)
        return False

    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(GrpcDatastore, "wait_connected", wait)
    endpoints = [f"127.0.0.1:{port}" for port in (1, 2, 3)]
    datastore = open_datastore(",".join(endpoints), NAMESPACE, 100)
    assert waits == [2.0, 0.5, 0.0]
    said = [record.args[0] for record in caplog.records if record.name == client.__name__]
    assert said == endpoints and "127.0.0.1:3: not there yet (" in caplog.text
    assert first_token(datastore) == -1


def test_a_service_s_ids_are_those_of_the_model(monkeypatch):
    """Whoever reaches the service may publish any id; the model has no row for it."""
    monkeypatch.setattr("datastore_service.client.GREETING_SECONDS", SECONDS)
    with running() as service:
        other = GrpcDatastore(service.endpoint, NAMESPACE)
        assert other.wait_connected(SECONDS)
        foreign = np.array([*range(15, 20), 500], np.int32)
        other.step([Entry("s", tokens=foreign, opening=Opening(), closing=True)], SECONDS)
        assert first_token(other) == 500
        before = DAMAGED_TREES.labels("tokens")._value.get()
        assert first_token(open_datastore(service.endpoint, NAMESPACE, 100)) == -1
        assert DAMAGED_TREES.labels("tokens")._value.get() == before + 1


def test_a_drafter_and_a_sender_of_prompts_show_their_token(tmp_path, monkeypatch):
    monkeypatch.setattr("datastore_service.client.GREETING_SECONDS", SECONDS)
    table = f'[identities.one]\ntokens = ["sha256:{token_digest("0" * 16)}"]\ndraft = ["*"]\npublish = ["*"]'
    put(tmp_path / "table", table)
    with running(table=watched_table(tmp_path / "table")) as service:
        access = partial(Access, token="0" * 16)
        sender = open_postbox(service.endpoint, NAMESPACE, access)
        drafter = open_datastore(service.endpoint, NAMESPACE, 100, access=access)
        eventually(lambda: service.drafting.streams == 2, "not both are connected", SECONDS)
        sender.close()
        drafter.close()


def test_a_token_that_cannot_be_read_is_why_nothing_is_connected(tmp_path):
    def access() -> Access:
        return Access(token=read_token(tmp_path / "gone"))

    datastore = GrpcDatastore("127.0.0.1:1", NAMESPACE, access)
    eventually(lambda: "gone" in datastore.disconnect_reason, "no reason", SECONDS)
    assert datastore.disconnect_reason.startswith(
        "cannot show who calls: [Errno 2] No such file or directory"
    )
    datastore.close()


@pytest.mark.parametrize(
    ("endpoint", "arguments", "message"),
    [
        ("nowhere", {}, "^endpoint: 'nowhere' is not HOST:PORT or unix:PATH .*embedded"),
        ("host:99999", {}, "^endpoint: port 99999 exceeds 65535"),
        ("host:1", {"prior": "dir"}, "^prior: the service at host:1 has its own"),
        ("embedded", {"vocab_size": 0}, "^vocab_size: 0 is less than 1"),
        (
            "embedded",
            {"access": partial(Access, token="x")},
            "^access: an embedded datastore has no connection",
        ),
    ],
)
def test_bad_arguments_name_themselves(endpoint, arguments, message):
    with pytest.raises(ValueError, match=message):
        open_datastore(endpoint, NAMESPACE, **{"vocab_size": 100} | arguments)


def test_importing_the_client_makes_no_grpc():
    """SGLang imports the plugin before it forks or spawns; gRPC must not have threads by then."""
    code = "import sys, datastore_service.client; sys.exit('grpc' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
