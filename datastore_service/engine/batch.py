"""One kernel call for a whole step: append what each session accepted, then draft for it."""

from __future__ import annotations

import numpy as np
from numba import njit

from datastore_service.engine.fusion import COLUMNS, INTEGER_ROWS, REAL_ROWS, grow_tree
from datastore_service.engine.kernel import kernel
from datastore_service.engine.memory import address_of, view_i32, view_i64
from datastore_service.engine.retrieval import (
    INDEX,
    INDEX_STOP,
    MAX_MATCH,
    MAX_SEGMENTS,
    SOURCE_FIELDS,
    STOP,
    TIER,
    TOKENS,
    WIDTH,
    fresh_occurrences,
    segment_occurrences,
    session_occurrences,
)
from datastore_service.engine.segment import Segment
from datastore_service.engine.session import BUFFER, LENGTH, SessionIndex, append_tokens
from datastore_service.engine.tree import Tier

# Fields of a request: the session's descriptor, its part of the appended tokens, where its known text starts, the
# budget, where its nodes are written and, from the kernel, where they end. Address 0: nothing to do.
SESSION, BEGIN, END, TEXT_START, NODES, DEPTH, CHILDREN, OUTPUT, DRAFTED = range(9)
REQUEST_FIELDS = 9
NO_REQUEST = (0,) * REQUEST_FIELDS
_CONTEXT, _INTERVALS, _COUNTS = range(INTEGER_ROWS, INTEGER_ROWS + 3)
_TIERS = max(Tier) + 1


class Scratch:
    """Working memory of one kernel call at a time, 2 MB of which a call touches a few KB."""

    __slots__ = ("integers", "reals")

    def __init__(self) -> None:
        self.integers = np.zeros((INTEGER_ROWS + 3, COLUMNS), dtype=np.int64)
        self.reals = np.zeros((REAL_ROWS, COLUMNS), dtype=np.float64)


def counts(scratches: list[Scratch]) -> tuple[int, np.ndarray, np.ndarray]:
    """Over all calls: drafts, and by Tier the drafts with a node of it and the nodes of it."""
    total = np.zeros(1 + 2 * _TIERS, dtype=np.int64)
    for scratch in list(scratches):
        total += scratch.integers[_COUNTS, : len(total)]
    return int(total[0]), total[1 : 1 + _TIERS], total[1 + _TIERS :]


def source_table(
    fresh: tuple[SessionIndex, ...], live: tuple[Segment, ...], prior: tuple[Segment, ...]
) -> np.ndarray:
    """int64 [1 + sources, SOURCE_FIELDS]: a row for the session, then fresh texts, live and prior segments.

    The caller keeps the sources alive as long as the table is used."""
    table = np.zeros((1 + len(fresh) + len(live) + len(prior), SOURCE_FIELDS), dtype=np.int64)
    table[0, [WIDTH, STOP, TIER]] = 4, INDEX_STOP, Tier.SESSION
    for row, index in enumerate(fresh, start=1):
        table[row, [TOKENS, WIDTH, STOP, TIER, INDEX]] = (
            address_of(index.tokens), 4, INDEX_STOP, Tier.LIVE, index.address,
        )  # fmt: skip
    for row, segment in enumerate(live + prior, start=1 + len(fresh)):
        table[row, :TIER] = segment.descriptor()
        table[row, TIER] = Tier.LIVE if row <= len(fresh) + len(live) else Tier.PRIOR
    return table


@njit(inline="always")
def _context(address, text_start, context):
    """Copies the last tokens of the request's own text. Returns how many, at most MAX_MATCH."""
    descriptor = view_i64(address, 5)
    length = descriptor[LENGTH]
    tokens = view_i32(descriptor[BUFFER], length)
    size = min(MAX_MATCH, length - text_start)
    for i in range(size):
        context[i] = tokens[length - size + i]
    return size


@njit(inline="always")
def _borders(sources):
    """The first live segment's row and the first prior segment's."""
    live = 1
    while live < len(sources) and sources[live, INDEX] != 0:
        live += 1
    prior = live
    while prior < len(sources) and sources[prior, TIER] == Tier.LIVE:
        prior += 1
    return live, prior


@njit(inline="always")
def _count_nodes(tiers, count):
    """Adds one draft to the counts."""
    count[0] += 1
    for tier in range(1, _TIERS):
        before = count[1 + _TIERS + tier]
        for drafted in tiers:
            count[1 + _TIERS + tier] += drafted == tier
        count[1 + tier] += count[1 + _TIERS + tier] > before


@kernel
def run_batch(requests, appended, sources, weights, integers, reals, nodes, probs, tiers):
    """Appends and drafts for each row of requests (int64 [batch, REQUEST_FIELDS]), in order.

    appended: int32, the new tokens of all. sources: see source_table; row 0 is overwritten, so a call owns its copy.
    nodes: int32 [2, total budget], tokens and parents; probs float32, tiers uint8 alike."""
    live, prior = _borders(sources)
    context = integers[_CONTEXT]
    intervals = integers[_INTERVALS, : 2 * MAX_SEGMENTS].reshape((MAX_SEGMENTS, 2))
    for entry in range(len(requests)):
        request = requests[entry]
        request[DRAFTED] = request[OUTPUT]
        address = request[SESSION]
        if address == 0:
            continue
        append_tokens(address, appended, request[BEGIN], request[END])
        size = _context(address, request[TEXT_START], context)
        if request[NODES] == 0:
            continue
        if size == 0:
            _count_nodes(tiers[:0], integers[_COUNTS])
            continue
        sources[0, TOKENS] = view_i64(address, 5)[BUFFER]
        count = session_occurrences(address, integers)
        if live > 1:
            count = fresh_occurrences(sources, 1, live, context, size, integers, count)
        if prior > live:
            count = segment_occurrences(sources, live, prior, context, size, intervals, integers, count)
        if prior < len(sources):
            count = segment_occurrences(
                sources, prior, len(sources), context, size, intervals, integers, count
            )
        begin, end = request[OUTPUT], request[OUTPUT] + request[NODES]
        size = grow_tree(
            integers,
            reals,
            count,
            sources,
            view_i64(address, 5)[LENGTH],
            weights,
            (request[NODES], request[DEPTH], request[CHILDREN]),
            nodes[:, begin:end],
            probs[begin:end],
            tiers[begin:end],
        )
        request[DRAFTED] = begin + size
        _count_nodes(tiers[begin : begin + size], integers[_COUNTS])
