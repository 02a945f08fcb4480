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


def _chain(nodes: int, token: int) -> drafting_pb2.Tree:
    return drafting_pb2.Tree(
        tokens=[token] * nodes, parents=range(nodes), probs=[1.0] * nodes, sources=bytes([1]) * nodes
    )


class NeverMatching(drafting_pb2_grpc.DraftingServicer):
    def __init__(self, token: int) -> None:
        self._token = token
        self._known: dict[str, int] = {}

    def Draft(self, request_iterator, context) -> Iterator[drafting_pb2.DraftReply]:  # noqa: N802
        for request in request_iterator:
            yield drafting_pb2.DraftReply(
                step=request.step, replies=[self._reply(e) for e in request.entries]
            )

    def _reply(self, entry: drafting_pb2.Entry) -> drafting_pb2.EntryReply:
        known = max(self._known.get(entry.session, 0), entry.start + len(entry.tokens))
        self._known[entry.session] = known
        tree = _chain(entry.budget.nodes, self._token)
        return drafting_pb2.EntryReply(status=drafting_pb2.STATUS_OK, known=known, tree=tree)


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
