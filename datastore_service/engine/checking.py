"""Checks a step's entries before any of them is applied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from datastore_service.protocol.names import MAX_NAME_BYTES
from datastore_service.protocol.types import (
    EMPTY_TOKENS,
    MAX_DEPTH,
    MAX_NODES,
    MAX_PRIORS,
    Budget,
    Entry,
    Opening,
    Query,
)

MAX_QUERIES = 4096  # of a step
MAX_QUERY_TOKENS = 256
_SHORT_NAME = MAX_NAME_BYTES // 4  # characters that fit in any case: one has at most four bytes
_FEW = 128  # tokens for which Python is quicker than NumPy


def check_entries(entries: Sequence[Entry], vocab_size: int) -> int:
    """Returns the number of queries. Raises ValueError naming the field and its limit. `joined_tokens` checks the
    tokens."""
    queries = 0
    for entry in entries:
        if not 0 < len(entry.session) <= _SHORT_NAME:
            _check_name(entry.session)
        if entry.start < 0:
            raise ValueError(f"start: {entry.start} is negative")
        for rejected in entry.rejected:
            if rejected.position < 0:
                raise ValueError(f"rejected.position: {rejected.position} is negative")
            _check_tokens("rejected.tokens", rejected.tokens, vocab_size)
        budget = entry.budget
        if budget.nodes and not (
            0 < budget.nodes <= MAX_NODES
            and 0 < budget.depth <= MAX_DEPTH
            and 0 < budget.children <= MAX_NODES
        ):
            _check_budget(budget, "budget")
        if entry.opening is not None:
            _check_opening(entry.opening)
        if entry.queries:
            queries += len(entry.queries)
            _check_queries(entry.queries)
    if queries > MAX_QUERIES:
        raise ValueError(f"queries: {queries} in one step exceed {MAX_QUERIES}")
    return queries


def refusal_of(entry: Entry, vocab_size: int) -> str:
    """The field and the limit that the entry breaks, "" if it breaks none."""
    try:
        joined_tokens([entry], check_entries([entry], vocab_size), vocab_size)
    except ValueError as error:
        return str(error)
    return ""


def joined_tokens(entries: Sequence[Entry], queries: int, vocab_size: int) -> np.ndarray:
    """int32, a new array of all entries' tokens and then of all queries' tokens. queries: 0 if there are none. Raises
    ValueError naming the field, the id and the limit."""
    tokens = _joined("tokens", [entry.tokens for entry in entries], vocab_size)
    if not queries:
        return tokens
    of_queries = [query.tokens for entry in entries for query in entry.queries]
    return np.concatenate((tokens, _joined("queries.tokens", of_queries, vocab_size)))


def _joined(name: str, parts: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    if not parts:
        return EMPTY_TOKENS
    for part in parts:
        if part.ndim != 1 or (part.dtype.kind not in "iu" and len(part)):
            raise ValueError(f"{name}: {part.ndim}-D {part.dtype}, not a 1-D integer array")
    tokens = np.concatenate(parts)
    if len(tokens):
        _check_range(name, tokens, vocab_size)
    return tokens.astype(np.int32, copy=False)


def _check_queries(queries: Sequence[Query]) -> None:
    for query in queries:
        if len(query.tokens) > MAX_QUERY_TOKENS:
            raise ValueError(f"queries.tokens: {len(query.tokens)} exceed {MAX_QUERY_TOKENS}")
        if query.budget.nodes:
            _check_budget(query.budget, "queries.budget")


def _check_opening(opening: Opening) -> None:
    if len(opening.conversation.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"opening.conversation: longer than {MAX_NAME_BYTES} bytes")
    if len(opening.workspace.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"opening.workspace: longer than {MAX_NAME_BYTES} bytes")
    if len(opening.group.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"opening.group: longer than {MAX_NAME_BYTES} bytes")
    if len(opening.priors) > MAX_PRIORS:
        raise ValueError(f"opening.priors: {len(opening.priors)} names exceed {MAX_PRIORS}")


def _check_name(name: str) -> None:
    if not name or len(name) > MAX_NAME_BYTES or len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"session: a name has 1 to {MAX_NAME_BYTES} bytes, not {name[:64]!r}")


def _check_tokens(name: str, tokens: np.ndarray, vocab_size: int) -> None:
    if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and len(tokens)):
        raise ValueError(f"{name}: {tokens.ndim}-D {tokens.dtype}, not a 1-D integer array")
    if len(tokens):
        _check_range(name, tokens, vocab_size)


def _check_range(name: str, tokens: np.ndarray, vocab_size: int) -> None:
    if len(tokens) < _FEW:  # a NumPy reduction takes microseconds for any size
        values = tokens.tolist()
        low, high = min(values), max(values)
    else:
        low, high = tokens.min(), tokens.max()
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name}: id {low if low < 0 else high} is outside [0, {vocab_size})")


def _check_budget(budget: Budget, name: str) -> None:
    if not 0 <= budget.nodes <= MAX_NODES:
        raise ValueError(f"{name}.nodes: {budget.nodes} is outside 0..{MAX_NODES}")
    if not 1 <= budget.depth <= MAX_DEPTH:
        raise ValueError(f"{name}.depth: {budget.depth} is outside 1..{MAX_DEPTH}")
    if not 1 <= budget.children <= MAX_NODES:
        raise ValueError(f"{name}.children: {budget.children} is outside 1..{MAX_NODES}")
