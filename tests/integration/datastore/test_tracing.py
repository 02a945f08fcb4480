"""A real service sends its spans to a collector that the environment names."""

import signal
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

from tests.integration.datastore.conftest import specstore
from tests.support.servers.datastore import DatastoreService


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
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield collector
    server.stop(0).wait()


def test_spans_reach_the_collector_before_the_service_ends(collector, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    with DatastoreService(tmp_path / "log") as service:
        monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
        assert specstore("stats", "--endpoint", service.endpoint).returncode == 0
        service.signal(signal.SIGTERM)
        assert service.wait(60) == 0
    assert collector.spans == [("specstore", "specstore.v1.Admin/Stats")]
