"""Turns messages into value types, which it checks, and back: the server's half. ``datastore_service.client.wire`` is the
client's.

Readers raise RefusalError (INVALID_ARGUMENT) naming the field and its limit. An entry of its own is answered by itself.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence

import numpy as np

from datastore_service.protocol.tree import DraftTree
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
    if request.HasField("columns"):
        if request.entries:
            raise invalid("columns: the message has entries besides")
        entries = _entries_of_columns(request.columns, vocab_size, limits)
    else:
        _check_limit(len(request.entries), limits.entries, "entries", "entries in one message")
        entries = [_entry_or_refusal(entry, vocab_size, limits) for entry in request.entries]
    if request.HasField("queries"):
        try:
            _add_queries(entries, request.queries, vocab_size, limits)
        except RefusalError as refusal:
            raise refusal.within("queries") from None
    return entries


def read_document(document: Sequence[int], field: str, vocab_size: int) -> np.ndarray:
    return _tokens(document, field, vocab_size)


def _entries_of_columns(
    message: pb.EntryColumns, vocab_size: int, limits: ServiceLimits
) -> list[Entry | str]:
    """The entries of columns. Those with a rare field are read one by one, and so are all if one of them breaks a limit."""
    _check_limit(len(message.sessions), limits.entries, "columns.sessions", "entries in one message")
    columns = _Columns(message)
    if columns.may_break(vocab_size, limits):
        rows: Sequence[int] = range(len(columns.sessions))
        entries: list[Entry | str] = [""] * len(rows)
    else:
        rows = sorted(message.more)
        entries = [*columns.common_entries()]
    for row in rows:
        entries[row] = _entry_or_refusal(columns.message(row), vocab_size, limits)
    return entries


class _Columns:
    """The columns as lists, which are read faster. Raises RefusalError if they do not fit each other."""

    def __init__(self, message: pb.EntryColumns) -> None:
        self.sessions, self._more = message.sessions[:], message.more
        self._starts, self._counts = message.starts[:], message.counts[:]
        self._nodes, self._depths = message.nodes[:], message.depths[:]
        self._children, self._tenants = message.children[:], message.tenants[:] or [""] * len(self.sessions)
        for name in ("starts", "counts", "nodes", "depths", "children", "tenants"):
            _check_column(len(getattr(self, f"_{name}")), len(self.sessions), f"columns.{name}", "sessions")
        self._ends = list(itertools.accumulate(self._counts))
        self._tokens = np.array(message.tokens, np.int64)
        _check_column(len(self._tokens), sum(self._counts), "columns.tokens", "in counts, in all")
        if self._more and max(self._more) >= len(self.sessions):
            raise invalid(f"columns.more: {max(self._more)} is not below the {len(self.sessions)} sessions")

    def may_break(self, vocab_size: int, limits: ServiceLimits) -> bool:
        """Whether an entry may break a limit; False is certain."""
        return bool(
            not all(self.sessions)
            or 4 * max(map(len, self.sessions + self._tenants), default=0) > limits.name_bytes
            or max(map(operator.add, self._starts, self._counts), default=0) > INT32_MAX
            or self._tokens.max(initial=0) >= vocab_size
            or max(self._nodes, default=0) > limits.nodes
            or max(self._depths, default=0) > limits.depth
            or max(self._children, default=0) > limits.children
            or ((0 in self._depths or 0 in self._children) and any(self._nodes))
        )

    def common_entries(self) -> list[Entry]:
        """The entries without what is rare."""
        tokens = self._tokens.astype(np.int32)
        parts = [tokens[end - count : end] for count, end in zip(self._counts, self._ends, strict=True)]
        budgets, nothing = map(_made_once, self._nodes, self._depths, self._children), itertools.repeat(())
        rare = nothing, budgets, itertools.repeat(None), itertools.repeat(False), itertools.repeat(0), nothing
        return list(map(Entry, self.sessions, self._starts, parts, *rare, self._tenants))

    def message(self, row: int) -> pb.Entry:
        """An entry as a message of its own."""
        entry = pb.Entry()
        if row in self._more:
            entry.CopyFrom(self._more[row])
        end = self._ends[row]
        entry.session, entry.start, entry.tenant = self.sessions[row], self._starts[row], self._tenants[row]
        entry.tokens[:] = self._tokens[end - self._counts[row] : end].tolist()
        entry.budget.nodes, entry.budget.depth = self._nodes[row], self._depths[row]
        entry.budget.children = self._children[row]
        return entry


def _entry_or_refusal(entry: pb.Entry, vocab_size: int, limits: ServiceLimits) -> Entry | str:
    try:
        return _entry(entry, vocab_size, limits)
    except RefusalError as refusal:
        return str(refusal)


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
        opening.epoch,
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


def reply_message(step: int, replies: Sequence[Reply], packed: bool = False) -> pb.DraftReply:
    """The message of a step's replies. packed: whether the caller reads packed trees."""
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
    filled = [tree for tree in trees + answers if len(tree)]
    if packed:
        message.packed_trees = _packed(filled)
    elif filled:
        message.tokens.extend(np.concatenate([tree.tokens for tree in filled]).tolist())
        message.parents.extend((np.concatenate([tree.parents for tree in filled]) + 1).tolist())
        message.probs.extend(np.concatenate([tree.probs for tree in filled]).tolist())
        message.sources = b"".join([tree.sources.tobytes() for tree in filled])
    return message


def _packed(trees: Sequence[DraftTree]) -> bytes:
    columns = (
        [tree.tokens for tree in trees],
        [tree.parents for tree in trees],
        [tree.probs for tree in trees],
        [tree.sources for tree in trees],
    )
    return b"".join([part.tobytes() for column in columns for part in column])
