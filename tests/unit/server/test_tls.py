"""A service with TLS: who gets in, and what is said of one without."""

import logging
from datetime import UTC, datetime, timedelta

import grpc
import numpy as np
import pytest
import trustme
from typer.testing import CliRunner

from datastore_service.cli.main import app
from datastore_service.client.access import Access
from datastore_service.client.channel import open_channel
from datastore_service.client.remote import GrpcDatastore
from datastore_service.endpoint import parse_endpoint
from datastore_service.protocol.types import Entry, Namespace, Opening, Status
from datastore_service.server.credentials import watched_tls
from datastore_service.server.engine_factory import engine_factory
from datastore_service.server.service import Service
from datastore_service.tls import Tls, client_tls
from proto_gen.specstore.v1 import admin_pb2
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from tests.integration.datastore.conftest import specstore
from tests.unit.certificates import Files, issue
from tests.unit.server.service import VOCAB, running
from tests.waiting import eventually

SECONDS = 60.0


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority, tmp_path_factory) -> Files:
    """The service's."""
    return issue(tmp_path_factory.mktemp("tls"), authority, "service")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory) -> Files:
    """Signed by somebody else."""
    return issue(tmp_path_factory.mktemp("tls"), trustme.CA(), "stranger")


@pytest.fixture(scope="module")
def service(files):
    with running(tls=watched_tls(files.certificate, files.key)) as service:
        yield service


@pytest.fixture(scope="module")
def mutual(files):
    with running(tls=watched_tls(files.certificate, files.key, files.ca)) as service:
        yield service


def answers(service: Service, tls: Tls | None) -> bool:
    """Whether an admin call is answered; any other refusal than an ended handshake is an error."""
    with open_channel(service.endpoint, tls) as channel:
        try:
            AdminStub(channel).Stats(admin_pb2.StatsRequest(), timeout=SECONDS)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False
    return True


def test_only_who_trusts_the_certificate_is_served(service, files, stranger):
    assert answers(service, client_tls(files.ca))
    assert not answers(service, None)
    assert not answers(service, client_tls(stranger.ca))


def test_a_renewed_certificate_is_shown_to_whoever_connects_then(authority, stranger, tmp_path):
    """And a connection that is open goes on with the earlier one."""
    own = issue(tmp_path, authority, "service")
    watched = watched_tls(own.certificate, own.key)
    with running(tls=watched) as service, open_channel(service.endpoint, client_tls(own.ca)) as channel:
        stats = AdminStub(channel).Stats
        stats(admin_pb2.StatsRequest(), timeout=SECONDS)
        before = watched.value
        for new, old in ((stranger.certificate, own.certificate), (stranger.key, own.key)):
            new.with_name("copy").write_bytes(new.read_bytes())
            new.with_name("copy").replace(old)
        eventually(lambda: watched.value is not before, "not seen", SECONDS)
        stats(admin_pb2.StatsRequest(), timeout=SECONDS)
        assert answers(service, client_tls(stranger.ca))
        assert not answers(service, client_tls(own.ca))


def test_mutual_tls_asks_for_a_signed_certificate(mutual, authority, files, stranger, tmp_path):
    client = issue(tmp_path, authority, "client")
    assert answers(mutual, client_tls(files.ca, client.certificate, client.key))
    assert not answers(mutual, client_tls(files.ca))
    assert not answers(mutual, client_tls(files.ca, stranger.certificate, stranger.key))


def test_a_worker_drafts_over_tls(service, files):
    datastore = GrpcDatastore(service.endpoint, Namespace("m", "t"), lambda: Access(client_tls(files.ca)))
    try:
        assert datastore.wait_connected(SECONDS)
        entry = Entry("s", tokens=np.arange(9, dtype=np.int32), opening=Opening())
        (reply,) = datastore.step([entry], SECONDS)
        assert (reply.status, reply.known) == (Status.OK, 9)
    finally:
        datastore.close()


def test_the_command_takes_the_files_as_options_or_variables(service, files, monkeypatch):
    monkeypatch.setattr("datastore_service.cli.admin.HEALTH_SECONDS", SECONDS)

    def health(*words: object):
        return CliRunner().invoke(app, ["health", "--endpoint", service.endpoint, *map(str, words)])

    refused = health()
    assert refused.exit_code == 1 and "does it want TLS" in refused.stderr
    assert health("--tls-ca", files.ca).stdout == "SERVING\n"
    monkeypatch.setenv("SPECSTORE_TLS_CA", str(files.ca))
    assert health().stdout == "SERVING\n"
    unfit = health("--tls-key", files.key)
    assert (unfit.exit_code, unfit.stderr) == (2, "specstore: tls-key: needs tls-certificate\n")


@pytest.mark.parametrize("with_tls", [False, True])
def test_a_remote_listener_without_tls_warns_once(with_tls, files, caplog):
    tls = watched_tls(files.certificate, files.key) if with_tls else None
    anywhere = Service(
        parse_endpoint("0.0.0.0:0"), engine_factory(None, VOCAB), token="t", allow_remote=True, tls=tls
    )
    with caplog.at_level(logging.WARNING, "datastore_service.server.service"):
        anywhere.start()
        anywhere.stop()
    warnings = [record for record in caplog.records if record.message.startswith("no TLS")]
    assert len(warnings) == (0 if with_tls else 1)


@pytest.mark.parametrize("days", [10, 100])
def test_a_certificate_that_ends_soon_is_told_of_at_the_start_and_later(
    days, authority, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("datastore_service.server.service.CHECK_SECONDS", 0.05)
    now = datetime.now(UTC)
    short = issue(tmp_path, authority, "short", now - timedelta(days=1), now + timedelta(days=days))

    def warnings():
        return [record for record in caplog.records if "ends soon" in record.message]

    with running(tls=watched_tls(short.certificate, short.key)) as service:
        if days == 10:
            eventually(lambda: len(warnings()) > 1, "it is not told of again", SECONDS)
            assert abs(warnings()[0].ends - now - timedelta(days=days)) < timedelta(seconds=1)
        else:
            assert answers(service, client_tls(short.ca)) and not warnings()


def test_the_command_refuses_a_certificate_that_has_ended(authority, tmp_path):
    now = datetime.now(UTC)
    old = issue(tmp_path, authority, "old", now - timedelta(days=2), now - timedelta(days=1))
    own = ("--tls-certificate", old.certificate, "--tls-key", old.key)
    done = specstore("serve", "--listen", "127.0.0.1:0", *own)  # in a process: it sets up logging
    assert done.returncode == 2
    assert done.stderr.startswith(f"specstore: tls-certificate: {old.certificate}: a certificate in it ended")
    assert done.stderr.count("\n") == 1
