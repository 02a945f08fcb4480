"""One kernel call for a whole step: append what each session accepted, then draft for it."""

from __future__ import annotations

import numpy as np
from numba import njit

from datastore_service.engine.fusion import (
    COLUMNS,
    INTEGER_ROWS,
    POLICY,
    PRIORITY_GRAM,
    REAL_ROWS,
    Policy,
    count_votes,
    draft_chain,
    grow_tree,
    unclaimed,
)
from datastore_service.engine.kernel import kernel
from datastore_service.engine.memory import address_of, view_i32, view_i64
from datastore_service.engine.retrieval import (
    FIRST_GRAM,
    FIRST_ROW,
    INDEX,
    INDEX_STOP,
    MATCH,
    MAX_MATCH,
    MAX_SEGMENTS,
    REJECTED_ROW,
    SAMPLES,
    SESSION_ROW,
    SOURCE_FIELDS,
    STOP,
    TIER,
    TOKENS,
    WIDTH,
    fresh_occurrences,
    refused_occurrences,
    segment_occurrences,
    session_occurrences,
)
from datastore_service.engine.segment import Segment
from datastore_service.engine.session import (
    BUFFER,
    DESCRIPTOR_FIELDS,
    LENGTH,
    REFUSED,
    SessionIndex,
    append_tokens,
)
from datastore_service.engine.tree import Tier

# Fields of a request: the session's descriptor, its part of the appended tokens, where its known text starts, the
# budget, where its nodes are written and, from the kernel, where they end. Address 0: nothing to do.
SESSION, BEGIN, END, TEXT_START, NODES, DEPTH, CHILDREN, OUTPUT, DRAFTED = range(9)
REQUEST_FIELDS = 9
NO_REQUEST = (0,) * REQUEST_FIELDS
_CONTEXT, _INTERVALS, _COUNTS = range(INTEGER_ROWS, INTEGER_ROWS + 3)
_TIERS = max(Tier) + 1
FEWEST = 8  # occurrences of one prefix length and tier that are looked at, and two more for each node wanted
WORTH = 1.0  # unclaimed probability times nodes below which no shorter prefix is looked up


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
    """int64 [FIRST_ROW + sources, SOURCE_FIELDS]: rows for the session and what was refused in it, then fresh texts, live
    and prior segments.

    The caller keeps the sources alive as long as the table is used."""
    table = np.zeros((FIRST_ROW + len(fresh) + len(live) + len(prior), SOURCE_FIELDS), dtype=np.int64)
    table[SESSION_ROW, [WIDTH, STOP, TIER]] = 4, INDEX_STOP, Tier.SESSION
    table[REJECTED_ROW, [WIDTH, STOP, TIER]] = 4, INDEX_STOP, Tier.REJECTED
    for row, index in enumerate(fresh, start=FIRST_ROW):
        table[row, [TOKENS, WIDTH, STOP, TIER, INDEX]] = (
            address_of(index.tokens), 4, INDEX_STOP, Tier.LIVE, index.address,
        )  # fmt: skip
    for row, segment in enumerate(live + prior, start=FIRST_ROW + len(fresh)):
        table[row, :TIER] = segment.descriptor()
        table[row, TIER] = Tier.LIVE if row < FIRST_ROW + len(fresh) + len(live) else Tier.PRIOR
    return table


@njit(inline="always")
def _context(address, text_start, context):
    """Copies the last tokens of the request's own text. Returns how many, at most MAX_MATCH."""
    descriptor = view_i64(address, DESCRIPTOR_FIELDS)
    length = descriptor[LENGTH]
    tokens = view_i32(descriptor[BUFFER], length)
    size = min(MAX_MATCH, length - text_start)
    for i in range(size):
        context[i] = tokens[length - size + i]
    return size


@njit(inline="always")
def _borders(sources):
    """The first live segment's row and the first prior segment's."""
    live = FIRST_ROW
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


@njit(inline="always")
def _enough(gram, nodes, count, weights, integers, reals):
    """Whether occurrences of no more than the last `gram` tokens would change nothing: for `weighted`, if what is left to
    claim is too little for a place among `nodes`; for `priority`, if a longer n-gram has been found."""
    if np.int64(weights[POLICY]) == Policy.PRIORITY:
        longest = np.int64(0)
        for i in range(count):
            longest = max(longest, integers[MATCH, i])
        return gram < PRIORITY_GRAM and longest > gram
    return unclaimed(reals, weights) * nodes < WORTH


@njit
def _occurrences(address, sources, bounds, context, size, nodes, weights, intervals, integers, reals):
    """Retrieval from all tiers, the longest prefixes first; returns how many occurrences there are."""
    live, prior, end = bounds
    most = min(SAMPLES, FEWEST + 2 * nodes)
    count = session_occurrences(address, most, integers)
    count = refused_occurrences(address, integers, count)
    if live > FIRST_ROW:
        count = fresh_occurrences(sources, FIRST_ROW, live, context, size, integers, count)
    count_votes(integers, reals, 0, count, sources)
    longer_live = longer_prior = MAX_MATCH + 1
    for gram in range(min(FIRST_GRAM, size), 0, -1):
        if _enough(gram, nodes, count, weights, integers, reals):
            break
        before = count
        if prior > live:
            count, longer_live = segment_occurrences(
                sources, live, prior, gram, longer_live, most, context, size, intervals, integers, count
            )
        if end > prior:
            count, longer_prior = segment_occurrences(
                sources, prior, end, gram, longer_prior, most, context, size, intervals, integers, count
            )
        count_votes(integers, reals, before, count, sources)
    return count


@kernel
def run_batch(requests, appended, sources, weights, integers, reals, nodes, probs, tiers):
    """Appends and drafts for each row of requests (int64 [batch, REQUEST_FIELDS]), in order.

    appended: int32, the new tokens of all. sources: see source_table; the session's rows are overwritten, so a call owns its copy.
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
        descriptor = view_i64(address, DESCRIPTOR_FIELDS)
        sources[SESSION_ROW, TOKENS] = descriptor[BUFFER]
        sources[REJECTED_ROW, TOKENS] = descriptor[REFUSED]
        bounds = live, prior, len(sources)
        count = _occurrences(
            address, sources, bounds, context, size, request[NODES], weights, intervals, integers, reals
        )
        begin, end = request[OUTPUT], request[OUTPUT] + request[NODES]
        budget = request[NODES], request[DEPTH], request[CHILDREN]
        out = nodes[:, begin:end], probs[begin:end], tiers[begin:end]
        if np.int64(weights[POLICY]) == Policy.PRIORITY:
            size = draft_chain(integers, count, sources, descriptor[LENGTH], weights, budget, *out)
        else:
            size = grow_tree(integers, reals, count, sources, descriptor[LENGTH], weights, budget, *out)
        request[DRAFTED] = begin + size
        _count_nodes(tiers[begin : begin + size], integers[_COUNTS])
