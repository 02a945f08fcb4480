"""`python -m benchmarks.echo`: a gRPC service that answers bytes with as many bytes as it is told to: what the transport
alone costs. The stream's first message is a JSON list, the length of the answer to each message after it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

METHOD = "/specstore.benchmarks.Echo/Echo"
THREADS = 2


def identity(message: bytes) -> bytes:
    return message


class _Handler(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method != METHOD:
            return None
        return grpc.stream_stream_rpc_method_handler(_echo, identity, identity)


def _echo(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    sizes = json.loads(next(requests))
    yield b""
    for size, _ in zip(sizes, requests, strict=False):
        yield bytes(size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    server = grpc.server(ThreadPoolExecutor(THREADS), handlers=[_Handler()])
    server.add_insecure_port(f"127.0.0.1:{given.port}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
