"""Spans of admin calls and of Draft streams, below the caller's; their trace in the log."""

import json
import logging

import grpc
import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from datastore_service.client.channel import open_channel
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Entry, Namespace, Opening
from datastore_service.server import admin, calls
from datastore_service.server.logs import JsonFormatter
from proto_gen.specstore.v1 import admin_pb2 as pb
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from tests.unit.server.service import running
from tests.waiting import eventually

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
UNKNOWN = pb.FlushRequest(namespace={"model": "none", "tokenizer": "t"}, all=True)


@pytest.fixture(scope="module")
def service():
    with running() as service:
        yield service


@pytest.fixture
def stub(service):
    with open_channel(service.endpoint) as channel:
        yield AdminStub(channel)


@pytest.fixture
def tracer(monkeypatch):
    """The service's tracer, of an SDK that keeps finished spans in `tracer.spans`."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    tracer.spans = exporter.get_finished_spans
    monkeypatch.setattr(calls, "_tracer", tracer)
    return tracer


def refused(act) -> None:
    with pytest.raises(grpc.RpcError):
        act()


def finished(tracer, name: str):
    eventually(lambda: any(span.name == name for span in tracer.spans()))
    (span,) = [span for span in tracer.spans() if span.name == name]
    return span


def test_an_admin_call_is_a_span_of_the_caller_s_trace(stub, tracer):
    stub.Stats(pb.StatsRequest(), metadata=TRACEPARENT)
    span = finished(tracer, "specstore.v1.Admin/Stats")
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.kind is SpanKind.SERVER
    assert dict(span.attributes) == {
        "rpc.system": "grpc",
        "rpc.service": "specstore.v1.Admin",
        "rpc.method": "Stats",
        "rpc.grpc.status_code": 0,
    }


def test_a_call_without_context_begins_a_trace(stub, tracer):
    stub.Stats(pb.StatsRequest())
    stub.ListNamespaces(pb.ListNamespacesRequest(), metadata=(("traceparent", "rubbish"),))
    for method in ("Stats", "ListNamespaces"):
        assert finished(tracer, f"specstore.v1.Admin/{method}").parent is None


def test_a_refusal_is_the_caller_s_error(stub, tracer):
    refused(lambda: stub.Flush(UNKNOWN, metadata=TRACEPARENT))
    span = finished(tracer, "specstore.v1.Admin/Flush")
    assert span.attributes["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]
    assert span.status.status_code is StatusCode.UNSET and not span.events


def test_a_fault_of_the_service_is_its_error(stub, tracer, monkeypatch):
    monkeypatch.setattr(admin, "version", lambda name: 1 / 0)
    refused(lambda: stub.Stats(pb.StatsRequest()))
    span = finished(tracer, "specstore.v1.Admin/Stats")
    assert span.status.status_code is StatusCode.ERROR and span.status.description == "division by zero"
    assert [event.name for event in span.events] == ["exception"]


def test_a_stream_is_one_span_of_the_worker_s_trace(service, tracer):
    with tracer.start_as_current_span("worker") as worker:
        datastore = GrpcDatastore(service.endpoint, Namespace("m", "t"))
    assert datastore.wait_connected(60)
    for start in range(3):
        entry = Entry("s", start, np.array([start], np.int32), opening=None if start else Opening())
        datastore.step([entry], 60)
    assert not [span for span in tracer.spans() if span.name.endswith("/Draft")], "none for a step"
    datastore.close()
    span = finished(tracer, "specstore.v1.Drafting/Draft")
    assert span.context.trace_id == worker.get_span_context().trace_id
    assert span.parent.span_id == worker.get_span_context().span_id
    assert span.status.status_code is StatusCode.UNSET, "hanging up is how a stream ends"


def test_log_lines_carry_the_trace_of_their_call(stub, caplog):
    """Without an SDK too: the operator then has the caller's trace id at least."""
    caplog.handler.setFormatter(JsonFormatter())
    with caplog.at_level(logging.INFO):
        refused(lambda: stub.Flush(UNKNOWN, metadata=TRACEPARENT))
        refused(lambda: stub.Compact(pb.CompactRequest(namespace=UNKNOWN.namespace)))
    lines = {line["method"]: line for line in map(json.loads, caplog.text.splitlines()) if "method" in line}
    flush, compact = lines["specstore.v1.Admin/Flush"], lines["specstore.v1.Admin/Compact"]
    assert (flush["trace_id"], flush["span_id"], flush["code"]) == (TRACE, PARENT, "NOT_FOUND")
    assert "trace_id" not in compact
