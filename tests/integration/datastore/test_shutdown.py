"""SIGTERM ends a service whatever its callers have sent."""

import signal

import grpc
import pytest

from tests.support.servers.datastore import DatastoreService
from tests.waiting import eventually

NO_MESSAGE = b"\xff" * 4
CALLS = 20
METHODS = [
    "/specstore.v1.Drafting/Draft",
    "/specstore.v1.Admin/Warmup",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.rpartition("/")[2])
def test_bytes_that_are_no_message(method, tmp_path):
    """gRPC's own answer to them left calls that a server waits for without end."""
    with DatastoreService(tmp_path / "log") as service:
        for _ in range(CALLS):
            with grpc.insecure_channel(service.endpoint) as channel, pytest.raises(grpc.RpcError) as refused:
                list(channel.stream_stream(method)(iter([NO_MESSAGE]), timeout=60))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert refused.value.details() == f"request: 4 bytes that are no message of {method[1:]}"
        service.signal(signal.SIGTERM)
        assert service.wait(60) == 0
        eventually(lambda: "stopped" in service.logs().splitlines()[-1])
