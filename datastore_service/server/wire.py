"""Turns messages into value types, which it checks, and back: the server's half. ``datastore_service.client.wire`` is the
client's.

Readers raise RefusalError (INVALID_ARGUMENT) naming the field and its limit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from datastore_service.protocol.types import (
    EMPTY_TOKENS,
    NO_DRAFT,
    Budget,
    Entry,
    Namespace,
    Opening,
    Query,
    Rejected,
    Reply,
)
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.refusal import RefusalError, invalid, precondition
from proto_gen.specstore.v1 import drafting_pb2 as pb

INT32_MAX = 2**31 - 1
_FEW = 32  # tokens that Python checks faster than NumPy


def namespace_message(namespace: Namespace) -> pb.Namespace:
    return pb.Namespace(model=namespace.model, tokenizer=namespace.tokenizer, tenant=namespace.tenant)


def read_namespace(message: pb.Namespace, limits: ServiceLimits) -> Namespace:
    for name in ("model", "tokenizer", "tenant"):
        _check_name(getattr(message, name), f"namespace.{name}", limits)
    if not message.tokenizer:
        raise precondition("namespace.tokenizer: missing; `specstore fingerprint` prints it")
    return Namespace(message.model, message.tokenizer, message.tenant)


def read_name(name: str, field: str, limits: ServiceLimits) -> str:
    _check_name(name, field, limits)
    return name


def read_entries(request: pb.DraftRequest, vocab_size: int, limits: ServiceLimits) -> list[Entry]:
    _check_limit(len(request.entries), limits.entries, "entries", "entries in one message")
    entries, queries = [], 0
    for i, entry in enumerate(request.entries):
        queries += len(entry.queries)
        _check_limit(queries, limits.queries, "entries.queries", "queries in one message")
        try:
            entries.append(_entry(entry, vocab_size, limits))
        except RefusalError as refusal:
            raise refusal.within(f"entries[{i}]") from None
    return entries


def read_document(document: Sequence[int], field: str, vocab_size: int) -> np.ndarray:
    return _tokens(document, field, vocab_size)


def _entry(entry: pb.Entry, vocab_size: int, limits: ServiceLimits) -> Entry:
    session, start, tokens = entry.session, entry.start, entry.tokens
    if not session:
        raise invalid("session: empty")
    _check_name(session, "session", limits)
    _check_limit(start + len(tokens), INT32_MAX, "start", "start and tokens")
    return Entry(
        session,
        start,
        _tokens(tokens, "tokens", vocab_size) if tokens else EMPTY_TOKENS,
        _rejected(entry.rejected, vocab_size, limits) if entry.rejected else (),
        _budget(entry.budget, limits),
        _opening(entry.opening, limits) if entry.HasField("opening") else None,
        entry.closing,
        queries=_queries(entry.queries, vocab_size, limits) if entry.queries else (),
    )


def _queries(queries: Sequence[pb.Query], vocab_size: int, limits: ServiceLimits) -> tuple[Query, ...]:
    read = []
    for i, query in enumerate(queries):
        try:
            _check_limit(len(query.tokens), limits.query_tokens, "tokens", "tokens")
            tokens = _tokens(query.tokens, "tokens", vocab_size)
            read.append(Query(tokens, _budget(query.budget, limits)))
        except RefusalError as refusal:
            raise refusal.within(f"queries[{i}]") from None
    return tuple(read)


def _rejected(
    rejected: Sequence[pb.Rejected], vocab_size: int, limits: ServiceLimits
) -> tuple[Rejected, ...]:
    _check_limit(len(rejected), limits.rejected, "rejected", "positions in one entry")
    read = []
    for i, refused in enumerate(rejected):
        _check_limit(refused.position, INT32_MAX, f"rejected[{i}].position")
        _check_limit(len(refused.tokens), limits.children, f"rejected[{i}].tokens", "siblings")
        read.append(Rejected(refused.position, _tokens(refused.tokens, f"rejected[{i}].tokens", vocab_size)))
    return tuple(read)


def _budget(budget: pb.Budget, limits: ServiceLimits) -> Budget:
    nodes, depth, children = budget.nodes, budget.depth, budget.children
    _check_limit(nodes, limits.nodes, "budget.nodes")
    _check_limit(depth, limits.depth, "budget.depth")
    _check_limit(children, limits.children, "budget.children")
    if nodes == 0:
        return NO_DRAFT
    if depth == 0 or children == 0:
        raise invalid(f"budget: {nodes} nodes need a depth and children of at least 1")
    return Budget(nodes, depth, children)


def _opening(opening: pb.Opening, limits: ServiceLimits) -> Opening:
    _check_name(opening.conversation, "opening.conversation", limits)
    _check_limit(opening.prompt_length, INT32_MAX, "opening.prompt_length")
    return Opening(
        opening.conversation, not opening.forbid_publish, opening.prompt_length, opening.handing_over
    )


def _check_name(name: str, field: str, limits: ServiceLimits) -> None:
    if 4 * len(name) > limits.name_bytes:  # a character has at most four bytes
        _check_limit(len(name.encode()), limits.name_bytes, field, "bytes")


def _check_limit(value: int, limit: int, field: str, unit: str = "") -> None:
    if value > limit:
        raise invalid(f"{field}: {value}{' ' + unit if unit else ''} exceeds {limit}")


def _tokens(tokens: Sequence[int], field: str, vocab_size: int) -> np.ndarray:
    """int32 array of a field of uint32."""
    if len(tokens) < _FEW:
        values = list(tokens)
        if not values or max(values) < vocab_size:
            return np.array(values, np.int32)
    array = np.fromiter(tokens, np.int64, len(tokens))
    if array.max() >= vocab_size:
        first = int((array >= vocab_size).argmax())
        raise invalid(f"{field}[{first}]: {array[first]} is not below the vocabulary's {vocab_size}")
    return array.astype(np.int32)


def reply_message(step: int, replies: Sequence[Reply]) -> pb.DraftReply:
    trees = [reply.tree for reply in replies]
    message = pb.DraftReply(
        step=step,
        statuses=[reply.status for reply in replies],  # type: ignore[misc]
        known=[reply.known for reply in replies],
        nodes=[len(tree) for tree in trees],
    )
    if any(reply.trees for reply in replies):
        answers = [tree for reply in replies for tree in reply.trees]
        message.queries.extend([len(reply.trees) for reply in replies])
        message.query_nodes.extend([len(tree) for tree in answers])
        trees += answers
    if any(message.nodes) or any(message.query_nodes):
        message.tokens.extend(np.concatenate([tree.tokens for tree in trees]).tolist())
        message.parents.extend((np.concatenate([tree.parents for tree in trees]) + 1).tolist())
        message.probs.extend(np.concatenate([tree.probs for tree in trees]).tolist())
        message.sources = b"".join([tree.sources.tobytes() for tree in trees])
    return message
