"""gRPC services that benchmarks compare with, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from proto_gen.specstore.v1 import drafting_pb2, drafting_pb2_grpc
from sglang_patches.launch.processes import free_port

ECHO = "/specstore.benchmarks.Echo/Echo"
THREADS = 4


@contextlib.contextmanager
def service(add: Callable[[grpc.Server], None]) -> Iterator[int]:
    """The port on which it is about to listen. add: puts the service on a server; sent to the process by its name."""
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(add, port), daemon=True)
    process.start()
    try:
        yield port
    finally:
        process.kill()
        process.join()


def _serve(add: Callable[[grpc.Server], None], port: int) -> None:
    server = grpc.server(ThreadPoolExecutor(THREADS))
    add(server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


class NeverMatching(drafting_pb2_grpc.DraftingServicer):
    """The control: drafts that never match, over the real protocol.

    It answers every request for a draft with a full tree of one reserved token that the model does not emit. What it costs
    is what verification costs; if it beats plain decoding, the plain baseline is slow and has to be mended first."""

    def __init__(self, token: int) -> None:
        self._token = token
        self._known: dict[str, int] = {}

    def Draft(self, request_iterator, context) -> Iterator[drafting_pb2.DraftReply]:  # noqa: N802
        for request in request_iterator:
            yield self._reply(request)

    def _reply(self, request: drafting_pb2.DraftRequest) -> drafting_pb2.DraftReply:
        """A chain for each entry."""
        nodes = [entry.budget.nodes for entry in request.entries]
        return drafting_pb2.DraftReply(
            step=request.step,
            statuses=[drafting_pb2.STATUS_OK] * len(nodes),
            known=[self._advance(entry) for entry in request.entries],
            nodes=nodes,
            tokens=[self._token] * sum(nodes),
            parents=[parent for size in nodes for parent in range(size)],
            probs=[1.0] * sum(nodes),
            sources=bytes([1]) * sum(nodes),
        )

    def _advance(self, entry: drafting_pb2.Entry) -> int:
        known = max(self._known.get(entry.session, 0), entry.start + len(entry.tokens))
        self._known[entry.session] = known
        return known


def add_never_matching(token: int, server: grpc.Server) -> None:
    drafting_pb2_grpc.add_DraftingServicer_to_server(NeverMatching(token), server)


class _Echo(grpc.GenericRpcHandler):
    """Answers bytes with as many bytes as it is told to: what the transport alone costs. The stream's first message is a JSON
    list, the length of the answer to each message after it."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.stream_stream_rpc_method_handler(self._echo) if details.method == ECHO else None

    @staticmethod
    def _echo(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        sizes = json.loads(next(requests))
        yield b""
        for size, _ in zip(sizes, requests, strict=False):
            yield bytes(size)


def add_echo(server: grpc.Server) -> None:
    server.add_generic_rpc_handlers([_Echo()])
