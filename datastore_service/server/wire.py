"""Turns messages into value types, which it checks, and back: the server's half. ``datastore_service.client.wire`` is the
client's.

Readers raise RefusalError (INVALID_ARGUMENT) naming the field and its limit. An entry of its own is answered by itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from datastore_service.protocol.types import (
    EMPTY_TOKENS,
    MAX_PRIORS,
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
from datastore_service.storage.quota_file import PARTS, Quota
from proto_gen.specstore.v1 import admin_pb2
from proto_gen.specstore.v1 import drafting_pb2 as pb

INT32_MAX = 2**31 - 1


def namespace_message(namespace: Namespace) -> pb.Namespace:
    return pb.Namespace(model=namespace.model, tokenizer=namespace.tokenizer, tenant=namespace.tenant)


def read_namespace(message: pb.Namespace, limits: ServiceLimits) -> Namespace:
    for name in ("model", "tokenizer", "tenant"):
        _check_name(getattr(message, name), f"namespace.{name}", limits)
    if not message.tokenizer:
        raise precondition("namespace.tokenizer: missing; `specstore fingerprint` prints it")
    return Namespace(message.model, message.tokenizer, message.tenant)


def read_tenant(
    message: admin_pb2.SetQuotaRequest | admin_pb2.ListQuotasRequest, limits: ServiceLimits
) -> str:
    if not message.HasField("tenant"):
        raise invalid('tenant: missing; "" is the tenant without a name')
    return read_name(message.tenant, "tenant", limits)


def read_quota(message: admin_pb2.SetQuotaRequest) -> Quota:
    try:
        return Quota(**{part: getattr(message, part) for part in PARTS if message.HasField(part)})
    except ValueError as error:
        raise invalid(str(error)) from error


def read_name(name: str, field: str, limits: ServiceLimits) -> str:
    _check_name(name, field, limits)
    return name


def read_entries(request: pb.DraftRequest, vocab_size: int, limits: ServiceLimits) -> list[Entry | str]:
    """The entries of a request. An entry that breaks a limit is replaced by its refusal, which names the field and the limit.

    Raises RefusalError for too many entries and for queries that break a limit."""
    _check_limit(len(request.entries), limits.entries, "entries", "entries in one message")
    entries: list[Entry | str] = []
    for entry in request.entries:
        try:
            entries.append(_entry(entry, vocab_size, limits))
        except RefusalError as refusal:
            entries.append(str(refusal))
    if request.HasField("queries"):
        try:
            _add_queries(entries, request.queries, vocab_size, limits)
        except RefusalError as refusal:
            raise refusal.within("queries") from None
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
        tenant=read_name(entry.tenant, "tenant", limits),
        withheld=entry.withheld,
    )


def _add_queries(
    entries: Sequence[Entry | str], queries: pb.Queries, vocab_size: int, limits: ServiceLimits
) -> None:
    lengths = list(queries.lengths)
    _check_limit(len(lengths), limits.queries, "lengths", "queries in one message")
    _check_column(len(queries.counts), len(entries), "counts", "entries")
    _check_column(sum(queries.counts), len(lengths), "counts", "queries, in all")
    _check_column(len(queries.tokens), sum(lengths), "tokens", "in lengths, in all")
    _check_values(lengths, limits.query_tokens, "lengths")
    tokens = _tokens(queries.tokens, "tokens", vocab_size)
    ends = itertools.accumulate(lengths)
    of_each = (tokens[end - length : end] for length, end in zip(lengths, ends, strict=True))
    read = map(Query, of_each, _budgets(queries, limits))
    for entry, count in zip(entries, queries.counts, strict=True):
        asked = tuple(itertools.islice(read, count))
        if isinstance(entry, Entry):
            entry.queries = asked


def _budgets(queries: pb.Queries, limits: ServiceLimits) -> list[Budget]:
    columns = {"nodes": limits.nodes, "depths": limits.depth, "children": limits.children}
    for name, limit in columns.items():
        _check_column(len(getattr(queries, name)), len(queries.lengths), name, "queries")
        _check_values(getattr(queries, name), limit, name)
    bounds = list(zip(queries.nodes, queries.depths, queries.children, strict=True))
    for i, (nodes, depth, children) in enumerate(bounds):
        if nodes and not (depth and children):
            raise invalid(f"nodes[{i}]: {nodes} need a depth and children of at least 1")
    return [_made_once(*bound) if bound[0] else NO_DRAFT for bound in bounds]


def _check_values(values: Sequence[int], limit: int, field: str) -> None:
    if values and max(values) > limit:
        first = next(i for i, value in enumerate(values) if value > limit)
        _check_limit(values[first], limit, f"{field}[{first}]")


def _check_column(size: int, wanted: int, field: str, of: str) -> None:
    if size != wanted:
        raise invalid(f"{field}: {size} for {wanted} {of}")


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
    return _made_once(nodes, depth, children)


_made_once = functools.lru_cache(64)(Budget)  # most entries of most steps have the same


def _opening(opening: pb.Opening, limits: ServiceLimits) -> Opening:
    _check_name(opening.conversation, "opening.conversation", limits)
    _check_limit(len(opening.priors), MAX_PRIORS, "opening.priors", "names")
    for i, name in enumerate(opening.priors):
        _check_name(name, f"opening.priors[{i}]", limits)
    _check_name(opening.workspace, "opening.workspace", limits)
    _check_name(opening.user, "opening.user", limits)
    _check_name(opening.group, "opening.group", limits)
    _check_limit(opening.prompt_length, INT32_MAX, "opening.prompt_length")
    return Opening(
        opening.conversation,
        not opening.forbid_publish,
        opening.prompt_length,
        opening.handing_over,
        tuple(opening.priors),
        opening.workspace,
        opening.user,
        opening.group,
    )


def _check_name(name: str, field: str, limits: ServiceLimits) -> None:
    if 4 * len(name) > limits.name_bytes:  # a character has at most four bytes
        _check_limit(len(name.encode()), limits.name_bytes, field, "bytes")


def _check_limit(value: int, limit: int, field: str, unit: str = "") -> None:
    if value > limit:
        raise invalid(f"{field}: {value}{' ' + unit if unit else ''} exceeds {limit}")


def _tokens(tokens: Sequence[int], field: str, vocab_size: int) -> np.ndarray:
    """int32 array of a field of uint32."""
    values = tokens[:]  # a list, made faster than by iterating
    if values and max(values) >= vocab_size:
        first = next(i for i, value in enumerate(values) if value >= vocab_size)
        raise invalid(f"{field}[{first}]: {values[first]} is not below the vocabulary's {vocab_size}")
    return np.array(values, np.int32)


def reply_message(step: int, replies: Sequence[Reply]) -> pb.DraftReply:
    trees = [reply.tree for reply in replies]
    message = pb.DraftReply(
        step=step,
        statuses=[reply.status for reply in replies],  # type: ignore[misc]
        known=[reply.known for reply in replies],
        nodes=[len(tree) for tree in trees],
    )
    for row, reply in enumerate(replies):
        if reply.refusal:
            message.refusals[row] = reply.refusal
    answers = [tree for reply in replies for tree in reply.trees]
    if answers:
        message.answers.counts.extend([len(reply.trees) for reply in replies])
        message.answers.nodes.extend([len(tree) for tree in answers])
        trees += answers
    if any(message.nodes) or any(map(len, answers)):
        message.tokens.extend(np.concatenate([tree.tokens for tree in trees]).tolist())
        message.parents.extend((np.concatenate([tree.parents for tree in trees]) + 1).tolist())
        message.probs.extend(np.concatenate([tree.probs for tree in trees]).tolist())
        message.sources = b"".join([tree.sources.tobytes() for tree in trees])
    return message
