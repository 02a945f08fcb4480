"""The service's log: callers choose how many calls, streams and names there are, and must not fill the disk with them."""

import json
import logging

import grpc
import numpy as np
import pytest

from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Entry, Namespace, Opening, Status
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.logs import (
    MOST_LINES,
    PERIOD_SECONDS,
    REFUSALS,
    CallersLimit,
    JsonFormatter,
    log_to_stderr,
)
from proto_gen.specstore.v1 import admin_pb2
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from tests.unit.server.service import running

MANY = 3 * MOST_LINES
SECONDS = 60.0


class Kept(logging.Handler):
    """Keeps what its filters let through."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def of(self, message: str) -> list[logging.LogRecord]:
        return [record for record in self.records if record.getMessage().startswith(message)]


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def kept(now):
    handler = Kept()
    handler.addFilter(CallersLimit(lambda: now[0]))
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


@pytest.fixture
def full():
    """A service without room for a tenant beside its first."""
    with running(ServiceLimits(namespaces=1)) as service:
        yield service


def step(datastore: GrpcDatastore, *tenants: str, session: str = "s") -> list[Status]:
    tokens = np.arange(9, dtype=np.int32)
    entries = [Entry(session, tokens=tokens, opening=Opening(), tenant=tenant) for tenant in tenants]
    return [reply.status for reply in datastore.step(entries, SECONDS)]


def connected(service) -> GrpcDatastore:
    datastore = GrpcDatastore(service.endpoint, Namespace("m", "t"), tenants=True)
    assert datastore.wait_connected(SECONDS)
    return datastore


def test_a_stream_that_names_ever_new_tenants(full, kept):
    datastore = connected(full)
    for first in range(0, MANY, 10):
        assert set(step(datastore, *(f"t{first + i}" for i in range(10)))) == {Status.OVER_BUDGET}
    datastore.close()
    (line,) = kept.of("tenant refused")
    assert line.tenant == "t0" and "its limit" in line.reason


def test_ever_new_streams(full, kept, now):
    def stream(tenant: str) -> None:
        datastore = connected(full)
        assert step(datastore, tenant) == [Status.OVER_BUDGET]
        assert step(datastore, "", session="x" * 300) == [Status.OVER_BUDGET]
        datastore.close()

    for number in range(MANY):
        stream(f"t{number}")
    for kind in ("tenant refused", "entry refused"):
        assert len(kept.of(kind)) == MOST_LINES
    now[0] = PERIOD_SECONDS
    stream("later")
    for kind in ("tenant refused", "entry refused"):
        assert kept.of(kind)[MOST_LINES].left_out == MANY - MOST_LINES


def test_ever_new_refused_calls(full, kept):
    with grpc.insecure_channel(full.endpoint) as channel:
        for number in range(MANY):
            request = admin_pb2.FlushRequest(namespace={"model": f"m{number}", "tokenizer": "t"}, all=True)
            with pytest.raises(grpc.RpcError):
                AdminStub(channel).Flush(request, timeout=SECONDS)
    assert len(kept.of("call refused")) == MOST_LINES


def test_lines_that_no_caller_causes_are_all_kept(kept):
    for number in range(MANY):
        logging.getLogger("datastore_service.engine.segment").error("segment taken out: %d", number)
    assert len(kept.of("segment taken out")) == MANY


def test_the_command_limits_them(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    log_to_stderr("warning")
    for _ in range(MANY):
        logging.getLogger(REFUSALS).warning("call refused")
    assert len(capsys.readouterr().err.splitlines()) == MOST_LINES


def test_the_number_left_out_is_in_the_line():
    record = logging.makeLogRecord({"name": "grpc._server", "msg": "late"})
    seconds = iter([0.0] * MANY + [PERIOD_SECONDS])
    limit = CallersLimit(lambda: next(seconds))
    assert sum(limit.filter(record) for _ in range(MANY)) == MOST_LINES
    assert limit.filter(record)
    assert json.loads(JsonFormatter().format(record))["left_out"] == MANY - MOST_LINES
