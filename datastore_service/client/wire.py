"""Value types to messages and back, the client's half (the server's is ``datastore_service.server.wire``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from datastore_service.engine.tree import EMPTY_TREE, DraftTree
from datastore_service.engine.types import Budget, Entry, Namespace, Opening, Rejected, Reply, Status
from proto_gen.specstore.v1 import drafting_pb2 as pb


def namespace_message(namespace: Namespace) -> pb.Namespace:
    return pb.Namespace(model=namespace.model, tokenizer=namespace.tokenizer, tenant=namespace.tenant)


def request_message(step: int, entries: Sequence[Entry]) -> pb.DraftRequest:
    return pb.DraftRequest(step=step, entries=[_entry(entry) for entry in entries])


def _entry(entry: Entry) -> pb.Entry:
    return pb.Entry(
        session=entry.session,
        start=entry.start,
        tokens=entry.tokens.tolist(),
        rejected=[_rejected(refused) for refused in entry.rejected],
        budget=_budget(entry.budget) if entry.budget.nodes else None,
        opening=_opening(entry.opening) if entry.opening else None,
        closing=entry.closing,
    )


def _rejected(rejected: Rejected) -> pb.Rejected:
    return pb.Rejected(position=rejected.position, tokens=rejected.tokens.tolist())


def _budget(budget: Budget) -> pb.Budget:
    return pb.Budget(nodes=budget.nodes, depth=budget.depth, children=budget.children)


def _opening(opening: Opening) -> pb.Opening:
    return pb.Opening(
        conversation=opening.conversation,
        forbid_publish=not opening.publish,
        prompt_length=opening.prompt_length,
    )


def read_replies(message: pb.DraftReply) -> list[Reply]:
    """Raises ValueError if the service sent columns of unequal length or a status that this client cannot read,
    OverflowError for a number that is no token id."""
    entries, nodes = len(message.statuses), sum(message.nodes)
    _check_columns(message, ("known", "nodes"), entries, "statuses")
    _check_columns(message, ("tokens", "parents", "probs", "sources"), nodes, "nodes in all")
    tokens = np.array(message.tokens, np.int32)
    parents = np.array(message.parents, np.int32) - 1
    probs = np.array(message.probs, np.float32)
    sources = np.frombuffer(message.sources, np.uint8)
    replies, end = [], 0
    for status, known, size in zip(message.statuses, message.known, message.nodes, strict=True):
        begin, end = end, end + size
        tree = (
            DraftTree(tokens[begin:end], parents[begin:end], probs[begin:end], sources[begin:end])
            if size
            else EMPTY_TREE
        )
        replies.append(Reply(Status(status), known, tree))
    return replies


def _check_columns(message: pb.DraftReply, names: Sequence[str], size: int, of: str) -> None:
    for name in names:
        if len(getattr(message, name)) != size:
            raise ValueError(f"{name}: {len(getattr(message, name))} for {size} {of}")
