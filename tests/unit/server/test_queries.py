"""Queries over real gRPC: as if their tokens were committed, and as if nobody had asked."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastore_service.client import open_datastore
from datastore_service.client.base import DatastoreError
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening, Query, Reply, Status
from tests.unit.server.service import VOCAB, running

NAMESPACE = Namespace("m", "a" * 64)
SECONDS = 60.0
ASK = Budget(8, 8, 4)
PUBLISHED = [1, 2, 0, 3, 1, 2, 2, 0, 1]

texts = st.lists(st.integers(0, 3), max_size=30)
questions = st.lists(
    st.tuples(st.lists(st.integers(0, 3), max_size=9), st.builds(Budget, st.sampled_from((0, 1, 16)), st.integers(1, 9))),
    min_size=1,
    max_size=4,
)  # fmt: skip
numbers = itertools.count()


@pytest.fixture(scope="module")
def service():
    with running() as service:
        yield service


@pytest.fixture(scope="module")
def datastore(service):
    datastore = GrpcDatastore(service.endpoint, NAMESPACE)
    assert datastore.wait_connected(SECONDS)
    ask(datastore, "writer", 0, PUBLISHED, opening=Opening(), closing=True)
    yield datastore
    datastore.close()


def ids(tokens) -> np.ndarray:
    return np.array(list(tokens), np.int32)


def ask(datastore, name: str, start: int, tokens, **fields) -> Reply:
    (reply,) = datastore.step([Entry(name, start, ids(tokens), **fields)], SECONDS)
    return reply


def plain(tree: DraftTree) -> tuple[list, ...]:
    return tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist(), tree.sources.tolist()


def real(datastore, text, budget: Budget) -> tuple[list, ...]:
    """The draft of a session that has this text."""
    opening = Opening(publish=False)
    return plain(ask(datastore, "real", 0, text, budget=budget, opening=opening, closing=True).tree)


@settings(max_examples=40)
@given(texts, texts, questions)
def test_answers_are_the_drafts_of_sessions_with_that_text(datastore, text, new, asked):
    name, opening = f"s{next(numbers)}", Opening(publish=False)
    ask(datastore, name, 0, text, opening=opening)
    queries = tuple(Query(ids(suffix), budget) for suffix, budget in asked)
    reply = ask(datastore, name, len(text), new, budget=ASK, queries=queries)
    assert (reply.status, reply.known) == (Status.OK, len(text + new))
    expected = [real(datastore, text + new + suffix, budget) for suffix, budget in asked]
    assert [plain(tree) for tree in reply.trees] == expected
    afterwards = ask(datastore, name, len(text + new), [], budget=ASK, closing=True)
    assert plain(afterwards.tree) == plain(reply.tree) == real(datastore, text + new, ASK)


def test_queries_are_no_statistic(service, datastore):
    (hosted,) = service.namespaces
    ask(datastore, "counted", 0, [1, 2, 3, 1, 2], opening=Opening(publish=False))
    before = hosted.engine.stats()
    reply = ask(datastore, "counted", 5, [], queries=(Query(ids([3]), ASK), Query(ids([2]), ASK)))
    assert all(map(len, reply.trees))
    assert hosted.engine.stats() == before
    ask(datastore, "counted", 5, [], closing=True)


def test_too_long_a_query_names_field_and_limit(datastore):
    with pytest.raises(DatastoreError, match=r"queries.lengths\[1\]: 257 exceeds 256"):
        ask(datastore, "s", 0, [], queries=(Query(ids([1]), ASK), Query(ids([1] * 257), ASK)))
    assert datastore.wait_connected(SECONDS)


def test_the_resilient_client_answers_with_the_service_and_without_it(monkeypatch):
    """Without it from the session alone: what another session published is not found."""
    monkeypatch.setattr("datastore_service.client.GREETING_SECONDS", SECONDS)
    with running() as service:
        datastore = open_datastore(service.endpoint, NAMESPACE, VOCAB)
        try:
            datastore.post([Entry("w", tokens=ids(PUBLISHED), opening=Opening(), closing=True)])
            datastore.post([Entry("s", tokens=ids([9, 9, 5]), opening=Opening(publish=False))])
            queries = tuple(Query(ids(suffix), ASK) for suffix in ([0, 3], [7, 8, 7]))
            reply = ask(datastore, "s", 3, [], queries=queries)
            assert [plain(tree) for tree in reply.trees] == [
                real(datastore, [9, 9, 5, *query.tokens], ASK) for query in queries
            ]
            assert [int(tree.tokens[0]) for tree in reply.trees] == [1, 8]
            service.stop()
            reply = ask(datastore, "s", 3, [], queries=queries)
            assert [tree.tokens.tolist()[:1] for tree in reply.trees] == [[], [8]]
        finally:
            datastore.close()
