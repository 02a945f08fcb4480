"""The services that benchmarks compare with, over gRPC."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import numpy as np

from benchmarks.rpc import Recorded, echo
from benchmarks.services import add_echo, add_never_matching, service
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening

SECONDS = 60.0


def test_the_control_drafts_chains_of_its_token_in_a_process_of_its_own():
    with service(partial(add_never_matching, 7)) as port:
        datastore = GrpcDatastore(f"127.0.0.1:{port}", Namespace("benchmark", "0" * 64))
        assert datastore.wait_connected(SECONDS)
        tokens = np.arange(5, dtype=np.int32)
        entries = [Entry("a", 0, tokens, budget=Budget(nodes=3), opening=Opening()), Entry("b", 0, tokens)]
        first, second = datastore.step(entries, SECONDS)
        datastore.close()
    assert first.tree.tokens.tolist() == [7, 7, 7] and first.tree.parents.tolist() == [-1, 0, 1]
    assert len(second.tree) == 0 and (first.known, second.known) == (5, 5)


def test_the_echo_answers_with_the_sizes_it_was_told():
    server = grpc.server(ThreadPoolExecutor(2))
    add_echo(server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with echo(port, [Recorded([], b"", 3), Recorded([], b"", 0), Recorded([], b"", 5)]) as send:
            assert [len(send(b"request")) for _ in range(3)] == [3, 0, 5]
    finally:
        server.stop(None)
