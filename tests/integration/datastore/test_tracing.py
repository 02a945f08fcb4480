"""A real service sends its spans to a collector that the environment names."""

import signal

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

from tests.integration.datastore.conftest import specstore
from tests.support.servers.datastore import DatastoreService
from tests.support.servers.otlp import collecting


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent: (service.name, span's name)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str]] = []

    def Export(self, request, context):  # noqa: N802
        for part in request.resource_spans:
            names = {a.key: a.value.string_value for a in part.resource.attributes}
            for scope in part.scope_spans:
                self.spans += [(names["service.name"], span.name) for span in scope.spans]
        return pb.ExportTraceServiceResponse()


@pytest.fixture
def collector():
    with collecting(Collector(), trace_service_pb2_grpc.add_TraceServiceServicer_to_server) as collector:
        yield collector


def test_spans_reach_the_collector_before_the_service_ends(collector, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    with DatastoreService(tmp_path / "log") as service:
        monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
        assert specstore("stats", "--endpoint", service.endpoint).returncode == 0
        service.signal(signal.SIGTERM)
        assert service.wait(60) == 0
    assert collector.spans == [("specstore", "specstore.v1.Admin/Stats")]
