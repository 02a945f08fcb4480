"""The control: a drafting service whose drafts never match, over the real protocol.

It answers every request for a draft with a full tree of one reserved token that the model does not emit. What it costs
is what verification costs; if it beats plain decoding, the plain baseline is slow and has to be mended first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from proto_gen.specstore.v1 import drafting_pb2, drafting_pb2_grpc


class NeverMatching(drafting_pb2_grpc.DraftingServicer):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token", type=int, required=True)
    arguments = parser.parse_args()
    server = grpc.server(ThreadPoolExecutor(4))
    drafting_pb2_grpc.add_DraftingServicer_to_server(NeverMatching(arguments.token), server)
    server.add_insecure_port(f"127.0.0.1:{arguments.port}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
