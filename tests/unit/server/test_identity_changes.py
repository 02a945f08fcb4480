"""Certificates, tokens, keys and rights that are replaced while workers draft, over real TLS."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import trustme
from cryptography import x509

from datastore_service.client.access import Access, read_token
from datastore_service.client.base import DatastoreError
from datastore_service.client.channel import open_channel
from datastore_service.client.remote import GrpcDatastore
from datastore_service.endpoint import parse_endpoint
from datastore_service.protocol.types import Entry, Namespace, Opening, Status
from datastore_service.server.credentials import watched_tls
from datastore_service.server.identity_file import watched_table
from datastore_service.server.service import Service
from datastore_service.tls import Tls, client_tls
from proto_gen.specstore.v1 import admin_pb2
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from tests.unit.certificates import Files, issue, issue_named
from tests.unit.server.identity_files import AUDIENCE, Issuer, put, write_keys
from tests.unit.server.service import running
from tests.waiting import eventually

SECONDS = 60.0
STEPS = 50  # of each worker, before and after a replacement
OLD, NEW = "old-0123456789abcdef", "new-0123456789abcdef"
ENGINE = """
[identities.engine]
certificates = ["uri:spiffe://example/engine"]
draft = ["acme", "globex"]
publish = ["acme"]
"""
TABLE = f"""
[jwt]
keys = "keys.json"
algorithms = ["ES256"]
audience = "{AUDIENCE}"

[identities.bearer]
token_files = ["token"]
draft = ["acme"]
read = ["*"]

[identities.signed]
claims = {{ sub = "worker" }}
draft = ["acme"]
read = ["*"]
"""


class House:
    """A service with a table and files that a test replaces."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, trustme.CA()
        self.own = issue(folder, self.authority, "service")
        engine = issue_named(folder, self.authority, "engine", "spiffe://example/engine")
        self.engine = client_tls(self.own.ca, engine.certificate, engine.key)
        plain = issue(folder, self.authority, "plain")
        self.plain = client_tls(self.own.ca, plain.certificate, plain.key)
        self.issuer = Issuer("old")
        write_keys(folder / "keys.json", self.issuer)
        put(folder / "token", OLD)
        put(folder / "jwt", self.issuer.token("worker"))
        self.write_table(ENGINE)

    def write_table(self, engine: str, bearer: str = "bearer") -> None:
        put(self.folder / "identities.toml", engine + TABLE.replace("bearer", bearer))

    @contextmanager
    def serving(self) -> Iterator[Service]:
        self.tls = watched_tls(self.own.certificate, self.own.key, self.own.ca)
        self.table = watched_table(self.folder / "identities.toml")
        with running(tls=self.tls, table=self.table) as self.service:
            yield self.service

    def replace(self, act) -> None:
        """Waits until the service has seen what the act has replaced, which it looks for each second."""
        before = self.tls.value, self.table.value
        act()
        eventually(lambda: (self.tls.value, self.table.value) != before, "not seen", SECONDS)

    @contextmanager
    def worker(self, tls: Tls | None, file: str = "", tenant: str = "acme") -> Iterator[GrpcDatastore]:
        def access() -> Access:
            return Access(tls, read_token(self.folder / file) if file else "")

        datastore = GrpcDatastore(self.service.endpoint, Namespace("m", "t", tenant), access, tenants=True)
        try:
            assert datastore.wait_connected(SECONDS), datastore.disconnect_reason
            yield datastore
        finally:
            datastore.close()

    def stats(self, token: str) -> grpc.StatusCode:
        with open_channel(self.service.endpoint, self.plain) as channel:
            try:
                AdminStub(channel).Stats(
                    admin_pb2.StatsRequest(), timeout=SECONDS, metadata=Access(token=token).metadata
                )
            except grpc.RpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    def shown_serial(self) -> int:
        """The serial number of the certificate that the service shows a new connection."""
        context = ssl.create_default_context(cafile=str(self.own.ca))
        plain = self.folder / "plain.pem", self.folder / "plain.key"
        context.load_cert_chain(*plain)
        endpoint = parse_endpoint(self.service.endpoint)
        with (
            socket.create_connection((endpoint.host, endpoint.port)) as tcp,
            context.wrap_socket(tcp, server_hostname="127.0.0.1") as connection,
        ):
            shown = connection.getpeercert(binary_form=True)
        assert shown
        return x509.load_der_x509_certificate(shown).serial_number


@pytest.fixture
def house(tmp_path) -> Iterator[House]:
    house = House(tmp_path)
    with house.serving():
        yield house


class Load:
    """A worker that drafts without a pause on a thread, until it is told to stop."""

    def __init__(self, datastore: GrpcDatastore, session: str) -> None:
        self._datastore, self._session, self.steps, self.fault = datastore, session, 0, ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                opening = None if self.steps else Opening()
                entry = Entry(
                    self._session, self.steps, np.array([self.steps % 7], np.int32), opening=opening
                )
                (reply,) = self._datastore.step([entry], SECONDS)
                assert (reply.status, reply.known) == (Status.OK, self.steps + 1)
                self.steps += 1
        except (DatastoreError, AssertionError) as error:
            self.fault = str(error) or repr(error)

    def go_on(self) -> None:
        """Waits for further steps."""
        until = self.steps + STEPS
        eventually(lambda: self.steps >= until or self.fault, "no steps", SECONDS)
        assert not self.fault

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(SECONDS)


def serial_of(files: Files) -> int:
    return x509.load_pem_x509_certificate(files.certificate.read_bytes()).serial_number


def renew(house: House) -> None:
    """Replaces certificate and key, one after the other, as tools do."""
    renewed = issue(house.folder / "renewed", house.authority, "service")
    for new, old in ((renewed.certificate, house.own.certificate), (renewed.key, house.own.key)):
        put(old, new.read_text())


def test_certificate_token_and_key_are_replaced_under_load(house, caplog):
    caplog.set_level(logging.INFO, "datastore_service.server")
    new = Issuer("new")
    with (
        house.worker(house.engine) as certified,
        house.worker(house.plain, "token") as bearer,
        house.worker(house.plain, "jwt") as signed,
    ):
        loads = [Load(each, f"s{number}") for number, each in enumerate((certified, bearer, signed))]
        old_jwt, first = house.issuer.token("worker"), house.shown_serial()
        try:
            for act in (
                lambda: renew(house),
                lambda: put(house.folder / "token", NEW),
                lambda: write_keys(house.folder / "keys.json", new),
            ):
                for load in loads:
                    load.go_on()
                house.replace(act)
            for load in loads:
                load.go_on()
        finally:
            for load in loads:
                load.stop()
        lost = [
            line
            for line in caplog.records
            if line.name.startswith("datastore_service.client") and line.levelno >= logging.WARNING
        ]
        assert not lost
    assert house.shown_serial() == serial_of(house.own) != first
    assert house.stats(OLD) is house.stats(old_jwt) is grpc.StatusCode.UNAUTHENTICATED
    assert house.stats(NEW) is house.stats(new.token("worker")) is grpc.StatusCode.OK


def refused_step(worker: GrpcDatastore) -> str:
    with pytest.raises(DatastoreError) as refused:
        worker.step([Entry("s", opening=Opening())], SECONDS)
    return str(refused.value)


def test_who_holds_a_withdrawn_token_is_turned_out_by_a_new_name_of_the_identity(house):
    """The worker that has got the new token meanwhile comes back with it by itself."""
    with house.worker(house.plain, "token") as worker:
        house.replace(lambda: put(house.folder / "token", NEW))
        worker.step([Entry("s", opening=Opening())], SECONDS)
        house.replace(lambda: house.write_table(ENGINE, bearer="renamed"))
        assert refused_step(worker) == "authorization: the service has no identity 'bearer' any more"
        assert worker.wait_connected(SECONDS), worker.disconnect_reason
        worker.step([Entry("s", opening=Opening())], SECONDS)


def test_a_worker_shows_a_renewed_certificate_when_it_connects_again(house):
    def access() -> Access:
        return Access(client_tls(house.own.ca, house.folder / "worker.pem", house.folder / "worker.key"))

    def give(name: str) -> None:
        files = issue_named(house.folder / name, house.authority, "worker", f"spiffe://example/{name}")
        for new in (files.key, files.certificate):
            put(house.folder / new.name, new.read_text())

    give("engine")
    worker = GrpcDatastore(house.service.endpoint, Namespace("m", "t", "acme"), access)
    try:
        assert worker.wait_connected(SECONDS), worker.disconnect_reason
        give("renewed")
        house.replace(lambda: house.write_table(ENGINE.replace("engine", "renewed")))
        assert "no identity 'engine' any more" in refused_step(worker)
        assert worker.wait_connected(SECONDS), worker.disconnect_reason
    finally:
        worker.close()


def test_a_withdrawn_right_ends_a_stream_at_its_next_message(house):
    with house.worker(house.engine) as worker:
        worker.step([Entry("s", opening=Opening())], SECONDS)
        house.replace(lambda: house.write_table(ENGINE.replace('"acme", "globex"', '"globex"')))
        assert refused_step(worker) == "draft: identity 'engine' may not draft for tenant 'acme'"


def test_an_identity_that_is_gone_ends_its_streams(house):
    with house.worker(house.engine) as worker:
        house.replace(lambda: house.write_table(""))
        assert refused_step(worker) == "authorization: the service has no identity 'engine' any more"


def test_a_right_that_was_given_is_there_without_a_new_stream(house):
    entry = Entry("s", tokens=np.arange(3), opening=Opening(), tenant="initech")
    with house.worker(house.engine) as worker:
        (before,) = worker.step([entry], SECONDS)
        house.replace(lambda: house.write_table(ENGINE.replace('"globex"', '"initech"')))
        (after,) = worker.step([entry], SECONDS)
    assert (before.status, after.status) == (Status.OVER_BUDGET, Status.OK)
    assert before.refusal == "draft: identity 'engine' may not draft for tenant 'initech'"


def live_tokens(house: House, tenant: str) -> int:
    hosted = house.service.namespaces.find(Namespace("m", "t", tenant))
    return sum(tier.tokens for kind, tier in hosted.engine.stats().tiers.items() if kind.name == "LIVE")


def test_outputs_enter_the_live_tier_only_where_the_caller_may_publish(house):
    whole = [
        Entry("s", tokens=np.arange(9), opening=Opening(), closing=True, tenant=tenant)
        for tenant in ("acme", "globex", "initech")
    ]
    with house.worker(house.engine) as worker:
        replies = worker.step(whole, SECONDS)
    assert [reply.status for reply in replies] == [Status.OK, Status.OK, Status.OVER_BUDGET]
    assert live_tokens(house, "acme") > 0 == live_tokens(house, "globex")
    assert house.service.namespaces.find(Namespace("m", "t", "initech")) is None


def test_a_session_whose_right_to_publish_was_withdrawn_is_not_published(house):
    with house.worker(house.engine) as worker:
        worker.step([Entry("s", tokens=np.arange(9), opening=Opening())], SECONDS)
        house.replace(lambda: house.write_table(ENGINE.replace('publish = ["acme"]', "")))
        worker.step([Entry("s", 9, closing=True)], SECONDS)
    assert live_tokens(house, "acme") == 0


def refused_files(service: Service) -> float | None:
    return service.metrics.registry.get_sample_value("specstore_files_refused")


@pytest.mark.parametrize(
    ("name", "text", "option", "reason"),
    [
        ("identities.toml", "[identities.engine]\nread = 7", "identities", "engine: proven by nothing"),
        ("keys.json", "{}", "identities", "jwt.keys: keys.json: not a JWK set"),
        ("token", "short", "identities", "a token has 16 printable"),
        ("service.pem", "rubbish", "tls-certificate", "no PEM certificate in it"),
    ],
)
def test_a_wrong_new_file_is_refused_and_the_old_stays_in_force(house, caplog, name, text, option, reason):
    path = house.folder / name
    good = path.read_text()
    (reloading,) = [each for each in (house.tls, house.table) if each.name == option]
    before = reloading.value
    put(path, text)
    eventually(lambda: reloading.refused, "not seen", SECONDS)
    told = [record for record in caplog.records if getattr(record, "option", "") == option]
    assert [record.levelname for record in told] == ["ERROR"] and reason in told[0].reason
    assert reloading.value is before
    assert refused_files(house.service) == 1
    with house.worker(house.engine) as worker:
        assert worker.step([Entry("s", opening=Opening())], SECONDS)[0].status is Status.OK
    put(path, good)
    eventually(lambda: not reloading.refused, "the mended file is not seen", SECONDS)
    assert refused_files(house.service) == 0
