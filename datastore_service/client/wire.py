"""Turns value types into messages and messages into value types: the client's half. ``datastore_service.server.wire`` is
the server's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import numpy as np

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import (
    MAX_VOCAB,
    Budget,
    Entry,
    Namespace,
    Opening,
    Query,
    Rejected,
    Reply,
    Status,
)
from proto_gen.specstore.v1 import drafting_pb2 as pb

_STATUSES = {
    status.value: status for status in Status
}  # faster than Status(), which raises for other numbers


def namespace_message(namespace: Namespace) -> pb.Namespace:
    return pb.Namespace(model=namespace.model, tokenizer=namespace.tokenizer, tenant=namespace.tenant)


def request_message(step: int, entries: Sequence[Entry]) -> pb.DraftRequest:
    return pb.DraftRequest(step=step, entries=[_entry(entry) for entry in entries])


def _entry(entry: Entry) -> pb.Entry:
    tokens = entry.tokens[entry.expected :] if entry.expected else entry.tokens
    message = pb.Entry(
        session=entry.session,
        start=entry.start + entry.expected,
        tokens=tokens.tolist(),
        closing=entry.closing,
    )
    if entry.budget.nodes:
        _set_budget(message.budget, entry.budget)
    if entry.rejected:
        message.rejected.extend([_rejected(refused) for refused in entry.rejected])
    if entry.opening:
        message.opening.CopyFrom(_opening(entry.opening))
    if entry.queries:
        message.queries.extend([_query(query) for query in entry.queries])
    return message


def _query(query: Query) -> pb.Query:
    message = pb.Query(tokens=query.tokens.tolist())
    _set_budget(message.budget, query.budget)
    return message


def _set_budget(message: pb.Budget, budget: Budget) -> None:
    message.nodes, message.depth, message.children = budget.nodes, budget.depth, budget.children


def _rejected(rejected: Rejected) -> pb.Rejected:
    return pb.Rejected(position=rejected.position, tokens=rejected.tokens.tolist())


def _opening(opening: Opening) -> pb.Opening:
    return pb.Opening(
        conversation=opening.conversation,
        forbid_publish=not opening.publish,
        prompt_length=opening.prompt_length,
        handing_over=opening.handing_over,
    )


def read_replies(message: pb.DraftReply, vocab_size: int = MAX_VOCAB) -> list[Reply]:
    """Raises ValueError if the service sent columns of unequal length, an unknown status or an id that is not below
    `vocab_size`, OverflowError for a number that is no token id."""
    entries, nodes = len(message.statuses), sum(message.nodes) + sum(message.query_nodes)
    _check_columns(message, ("known", "nodes"), entries, "statuses")
    queries = message.queries or [0] * entries
    if len(queries) != entries or sum(queries) != len(message.query_nodes):
        raise ValueError(
            f"queries: {sum(queries)} of {len(queries)} entries for {len(message.query_nodes)} trees of {entries}"
        )
    _check_columns(message, ("tokens", "parents", "probs", "sources"), nodes, "nodes in all")
    tokens = np.fromiter(message.tokens, np.int32, nodes)
    if nodes and tokens.max() >= vocab_size:  # the model has no embedding for it
        raise ValueError(f"tokens: {tokens.max()} is not below the vocabulary's {vocab_size}")
    parents = np.array(message.parents, np.int32) - 1
    probs = np.array(message.probs, np.float32)
    sources = np.frombuffer(message.sources, np.uint8)
    trees, end = [], 0
    for size in chain(message.nodes, message.query_nodes):
        begin, end = end, end + size
        trees.append(
            DraftTree(tokens[begin:end], parents[begin:end], probs[begin:end], sources[begin:end])
            if size
            else EMPTY_TREE
        )
    answers = iter(trees[entries:])
    return [
        Reply(
            _STATUSES.get(status) or Status(status),
            known,
            tree,
            tuple(islice(answers, count)) if count else (),
        )
        for status, known, tree, count in zip(message.statuses, message.known, trees, queries, strict=False)
    ]


def _check_columns(message: pb.DraftReply, names: Sequence[str], size: int, of: str) -> None:
    for name in names:
        if len(getattr(message, name)) != size:
            raise ValueError(f"{name}: {len(getattr(message, name))} for {size} {of}")
