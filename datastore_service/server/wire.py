"""Messages to value types, checked, and back: the server's half (the client's is ``datastore_service.client.wire``).

Readers raise RefusalError (INVALID_ARGUMENT) naming the field and its limit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from datastore_service.engine.tree import DraftTree
from datastore_service.engine.types import (
    EMPTY_TOKENS,
    NO_DRAFT,
    Budget,
    Entry,
    Namespace,
    Opening,
    Rejected,
    Reply,
)
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.refusal import invalid, precondition
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


def read_name(name: str, field: str, limits: ServiceLimits) -> str:
    _check_name(name, field, limits)
    return name


def read_entries(request: pb.DraftRequest, vocab_size: int, limits: ServiceLimits) -> list[Entry]:
    _check_limit(len(request.entries), limits.entries, "entries", "entries in one message")
    return [
        _Reader(f"entries[{i}]", vocab_size, limits).entry(entry) for i, entry in enumerate(request.entries)
    ]


def read_document(document: Sequence[int], field: str, vocab_size: int) -> np.ndarray:
    return _tokens(document, field, vocab_size)


class _Reader:
    """Reads one entry; `at` is its place in the message."""

    __slots__ = ("_at", "_limits", "_vocab_size")

    def __init__(self, at: str, vocab_size: int, limits: ServiceLimits) -> None:
        self._at, self._vocab_size, self._limits = at, vocab_size, limits

    def entry(self, entry: pb.Entry) -> Entry:
        if not entry.session:
            raise invalid(f"{self._at}.session: empty")
        _check_name(entry.session, f"{self._at}.session", self._limits)
        _check_limit(entry.start + len(entry.tokens), INT32_MAX, f"{self._at}.start", "start and tokens")
        return Entry(
            session=entry.session,
            start=entry.start,
            tokens=_tokens(entry.tokens, f"{self._at}.tokens", self._vocab_size),
            rejected=self._rejected(entry.rejected) if entry.rejected else (),
            budget=self._budget(entry.budget) if entry.HasField("budget") else NO_DRAFT,
            opening=self._opening(entry.opening) if entry.HasField("opening") else None,
            closing=entry.closing,
        )

    def _rejected(self, rejected: Sequence[pb.Rejected]) -> tuple[Rejected, ...]:
        at = f"{self._at}.rejected"
        _check_limit(len(rejected), self._limits.rejected, at, "positions in one entry")
        for i, refused in enumerate(rejected):
            _check_limit(refused.position, INT32_MAX, f"{at}[{i}].position")
            _check_limit(len(refused.tokens), self._limits.children, f"{at}[{i}].tokens", "siblings")
        return tuple(
            Rejected(refused.position, _tokens(refused.tokens, f"{at}[{i}].tokens", self._vocab_size))
            for i, refused in enumerate(rejected)
        )

    def _budget(self, budget: pb.Budget) -> Budget:
        for name in ("nodes", "depth", "children"):
            _check_limit(getattr(budget, name), getattr(self._limits, name), f"{self._at}.budget.{name}")
        if budget.nodes and not (budget.depth and budget.children):
            raise invalid(f"{self._at}.budget: {budget.nodes} nodes need a depth and children of at least 1")
        return Budget(budget.nodes, budget.depth, budget.children)

    def _opening(self, opening: pb.Opening) -> Opening:
        _check_name(opening.conversation, f"{self._at}.opening.conversation", self._limits)
        _check_limit(opening.prompt_length, INT32_MAX, f"{self._at}.opening.prompt_length")
        return Opening(opening.conversation, not opening.forbid_publish, opening.prompt_length)


def _check_name(name: str, field: str, limits: ServiceLimits) -> None:
    _check_limit(len(name.encode()), limits.name_bytes, field, "bytes")


def _check_limit(value: int, limit: int, field: str, unit: str = "") -> None:
    if value > limit:
        raise invalid(f"{field}: {value}{' ' + unit if unit else ''} exceeds {limit}")


def _tokens(tokens: Sequence[int], field: str, vocab_size: int) -> np.ndarray:
    """int32; the field has uint32."""
    if not tokens:
        return EMPTY_TOKENS
    array = np.fromiter(tokens, np.int64, len(tokens))
    if array.max() >= vocab_size:
        first = int((array >= vocab_size).argmax())
        raise invalid(f"{field}[{first}]: {array[first]} is not below the vocabulary's {vocab_size}")
    return array.astype(np.int32)


def reply_message(step: int, replies: Sequence[Reply]) -> pb.DraftReply:
    return pb.DraftReply(step=step, replies=[_entry_reply(reply) for reply in replies])


def _entry_reply(reply: Reply) -> pb.EntryReply:
    tree = _tree(reply.tree) if len(reply.tree) else None
    return pb.EntryReply(status=int(reply.status), known=reply.known, tree=tree)  # type: ignore[arg-type]


def _tree(tree: DraftTree) -> pb.Tree:
    return pb.Tree(
        tokens=tree.tokens.tolist(),
        parents=(tree.parents + 1).tolist(),
        probs=tree.probs.tolist(),
        sources=tree.sources.tobytes(),
    )
