"""Turns value types into messages and messages into value types: the client's half. ``datastore_service.server.wire`` is
the server's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import (
    MAX_VOCAB,
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


def request_message(step: int, entries: Sequence[Entry], with_rejected: bool = True) -> pb.DraftRequest:
    message = pb.DraftRequest(step=step, entries=[_entry(entry, with_rejected) for entry in entries])
    queries = [query for entry in entries for query in entry.queries]
    if queries:
        message.queries.CopyFrom(_queries(queries))
        message.queries.counts.extend([len(entry.queries) for entry in entries])
    return message


def _entry(entry: Entry, with_rejected: bool) -> pb.Entry:
    tokens = entry.tokens[entry.expected :] if entry.expected else entry.tokens
    message = pb.Entry(
        session=entry.session,
        start=entry.start + entry.expected,
        tokens=tokens.tolist(),
        closing=entry.closing,
    )
    budget = entry.budget
    if budget.nodes:
        bounds = message.budget
        bounds.nodes, bounds.depth, bounds.children = budget.nodes, budget.depth, budget.children
    if entry.rejected and with_rejected:
        message.rejected.extend([_rejected(refused) for refused in entry.rejected])
    if entry.tenant:
        message.tenant = entry.tenant
    if entry.opening:
        message.opening.CopyFrom(_opening(entry.opening))
    return message


def _queries(queries: Sequence[Query]) -> pb.Queries:
    budgets = [query.budget for query in queries]
    return pb.Queries(
        tokens=np.concatenate([query.tokens for query in queries]).tolist(),
        lengths=[len(query.tokens) for query in queries],
        nodes=[budget.nodes for budget in budgets],
        depths=[budget.depth for budget in budgets],
        children=[budget.children for budget in budgets],
    )


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
    entries, sizes, answered = len(message.statuses), list(message.nodes), False
    _check_columns(message, ("known", "nodes"), entries, "statuses")
    if message.HasField("answers"):
        answered = True
        sizes += _answer_sizes(message.answers, entries)
    nodes = sum(sizes)
    _check_columns(message, ("tokens", "parents", "probs", "sources"), nodes, "nodes in all")
    tokens = np.fromiter(message.tokens, np.int32, nodes)
    if nodes and tokens.max() >= vocab_size:  # the model has no embedding for it
        raise ValueError(f"tokens: {tokens.max()} is not below the vocabulary's {vocab_size}")
    parents = np.array(message.parents, np.int32) - 1
    probs = np.array(message.probs, np.float32)
    sources = np.frombuffer(message.sources, np.uint8)
    trees, end = [], 0
    for size in sizes:
        begin, end = end, end + size
        trees.append(
            DraftTree(tokens[begin:end], parents[begin:end], probs[begin:end], sources[begin:end])
            if size
            else EMPTY_TREE
        )
    replies = [
        Reply(_STATUSES.get(status) or Status(status), known, tree)
        for status, known, tree in zip(message.statuses, message.known, trees, strict=False)
    ]
    for row, refusal in message.refusals.items():
        if row < len(replies):
            replies[row].refusal = refusal
    if answered:
        answers = iter(trees[entries:])
        for reply, count in zip(replies, message.answers.counts, strict=True):
            reply.trees = tuple(islice(answers, count))
    return replies


def _answer_sizes(answers: pb.Answers, entries: int) -> list[int]:
    if len(answers.counts) != entries or sum(answers.counts) != len(answers.nodes):
        raise ValueError(
            f"answers: {len(answers.counts)} counts, in all {sum(answers.counts)}, for {entries} entries and"
            f" {len(answers.nodes)} trees"
        )
    return list(answers.nodes)


def _check_columns(message: pb.DraftReply, names: Sequence[str], size: int, of: str) -> None:
    for name in names:
        if len(getattr(message, name)) != size:
            raise ValueError(f"{name}: {len(getattr(message, name))} for {size} {of}")
