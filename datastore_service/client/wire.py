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
    """Raises ValueError if the service sent a status or a tree that this client cannot read."""
    return [Reply(Status(reply.status), reply.known, _tree(reply.tree)) for reply in message.replies]


def _tree(tree: pb.Tree) -> DraftTree:
    size = len(tree.tokens)
    if size == 0:
        return EMPTY_TREE
    if not len(tree.parents) == len(tree.probs) == len(tree.sources) == size:
        raise ValueError(
            f"tree: {size} tokens, {len(tree.parents)} parents, {len(tree.probs)} probs, {len(tree.sources)} sources"
        )
    return DraftTree(
        np.fromiter(tree.tokens, np.int32, size),
        np.fromiter(tree.parents, np.int32, size) - 1,
        np.fromiter(tree.probs, np.float32, size),
        np.frombuffer(tree.sources, np.uint8),
    )
