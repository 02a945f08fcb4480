"""The kernel of a step: for each session it appends the accepted tokens and then drafts."""

from __future__ import annotations

import numpy as np
from numba import njit

from datastore_service.engine.fusion import (
    INTEGER_ROWS,
    POLICY,
    PRIORITY_GRAM,
    Policy,
    count_votes,
    draft_chain,
    grow_tree,
    unclaimed,
)
from datastore_service.engine.kernel import kernel
from datastore_service.engine.memory import address_of, view_i32, view_i64
from datastore_service.engine.retrieval import (
    FIRST_PREFIX,
    FIRST_ROW,
    INDEX,
    INDEX_STOP,
    MATCH,
    MAX_MATCH,
    MAX_SEGMENTS,
    OWNER,
    PREFIXES,
    REJECTED_ROW,
    SAMPLES,
    SESSION_ROW,
    SOURCE_FIELDS,
    STOP,
    TIER,
    TOKENS,
    VOCAB,
    WIDTH,
    fresh_occurrences,
    longest_prefix,
    refused_occurrences,
    segment_occurrences,
    session_occurrences,
)
from datastore_service.engine.segment import Segment
from datastore_service.engine.session import (
    BUFFER,
    DESCRIPTOR_FIELDS,
    DRAFT,
    DRAFT_NODES,
    DRAFT_PARENTS,
    DRAFT_ROOM,
    DRAFT_ROWS,
    DRAFT_TIERS,
    DRAFT_TOKENS,
    GRAMS,
    LENGTH,
    LEVELS,
    REFUSED,
    SessionIndex,
    append_tokens,
    follow_with,
)
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import MAX_VOCAB

# Fields of a request: address of the session's descriptor (0: nothing to do), the range of its tokens, the start of the
# request's own text, the budget, the range of its rows among the sources, where its nodes are written and, set by the kernel, where
# they end.
SESSION, BEGIN, END, TEXT_START, NODES, DEPTH, CHILDREN, FIRST_SOURCE, LAST_SOURCE, OUTPUT, DRAFTED = range(
    11
)
REQUEST_FIELDS = 11
_CONTEXT, _INTERVALS, COUNTERS_ROW, _DESCRIPTOR = range(INTEGER_ROWS, INTEGER_ROWS + 4)
SCRATCH_ROWS = INTEGER_ROWS + 4
TIERS = max(Tier) + 1
COUNTERS = 1 + 3 * TIERS
_MIN_SAMPLES = 8  # of each prefix length and tier; two more for each node of the budget
_MIN_GAIN = 2.0  # unclaimed probability times nodes; below it shorter prefixes are not looked up


def source_table(
    fresh: tuple[SessionIndex, ...], live: tuple[Segment, ...], prior: tuple[Segment, ...]
) -> np.ndarray:
    """int64 [FIRST_ROW + sources, SOURCE_FIELDS]: rows for the session and for the tokens refused in it, then for fresh
    texts, live segments and prior segments.

    The caller keeps the sources alive as long as the table is used."""
    table = np.zeros((FIRST_ROW + len(fresh) + len(live) + len(prior), SOURCE_FIELDS), dtype=np.int64)
    table[:, VOCAB] = MAX_VOCAB
    table[SESSION_ROW, [WIDTH, STOP, TIER]] = 4, INDEX_STOP, Tier.SESSION
    table[REJECTED_ROW, [WIDTH, STOP, TIER]] = 4, INDEX_STOP, Tier.REJECTED
    for row, index in enumerate(fresh, start=FIRST_ROW):
        table[row, [TOKENS, WIDTH, STOP, TIER, INDEX, OWNER]] = (
            address_of(index.tokens), 4, INDEX_STOP, Tier.LIVE, index.address, index.owner,
        )  # fmt: skip
    for row, segment in enumerate(live + prior, start=FIRST_ROW + len(fresh)):
        table[row, :TIER] = segment.descriptor()
        table[row, VOCAB] = segment.vocab_size
        table[row, TIER] = Tier.LIVE if row < FIRST_ROW + len(fresh) + len(live) else Tier.PRIOR
    return table


@njit(inline="always")
def _context(descriptor, text_start, context):
    """Copies the last tokens of the request's own text, at most MAX_MATCH. Returns how many."""
    length = descriptor[LENGTH]
    tokens = view_i32(descriptor[BUFFER], length)
    size = min(MAX_MATCH, length - text_start)
    for i in range(size):
        context[i] = tokens[length - size + i]
    return size


@njit(inline="always")
def _borders(sources):
    """The rows of the first live segment and of the first prior segment."""
    live = FIRST_ROW
    while live < len(sources) and sources[live, INDEX] != 0:
        live += 1
    prior = live
    while prior < len(sources) and sources[prior, TIER] == Tier.LIVE:
        prior += 1
    return live, prior


@njit(inline="always")
def _count_nodes(tiers, count):
    """Adds one draft to the counters."""
    count[0] += 1
    for tier in range(1, TIERS):
        before = count[1 + TIERS + tier]
        for drafted in tiers:
            count[1 + TIERS + tier] += drafted == tier
        count[1 + tier] += count[1 + TIERS + tier] > before


@njit(inline="always")
def _count_accepted(descriptor, appended, begin, end, count):
    """Counts the last draft's nodes on the path that the new tokens take, and forgets the draft."""
    room, size = descriptor[DRAFT_ROOM], descriptor[DRAFT_NODES]
    draft = view_i32(descriptor[DRAFT], DRAFT_ROWS * room)
    last = np.int64(-1)
    for node in range(size):
        if begin == end:
            break
        parent, token = draft[DRAFT_PARENTS * room + node], draft[DRAFT_TOKENS * room + node]
        if parent == last and token == appended[begin]:
            count[1 + 2 * TIERS + draft[DRAFT_TIERS * room + node]] += 1
            last = node
            begin += 1
    descriptor[DRAFT_NODES] = 0


@njit(inline="always")
def _keep_draft(descriptor, tokens, parents, tiers):
    room = descriptor[DRAFT_ROOM]
    draft = view_i32(descriptor[DRAFT], DRAFT_ROWS * room)
    for node in range(len(tokens)):
        draft[DRAFT_TOKENS * room + node] = tokens[node]
        draft[DRAFT_PARENTS * room + node] = parents[node]
        draft[DRAFT_TIERS * room + node] = tiers[node]
    descriptor[DRAFT_NODES] = len(tokens)


@njit(inline="always")
def _longest_match(integers, count):
    longest = np.int64(0)
    for i in range(count):
        longest = max(longest, integers[MATCH, i])
    return longest


@njit(inline="always")
def _is_enough(gram, nodes, count, weights, integers, reals):
    """Whether matches of `gram` tokens or fewer would change almost nothing. `weighted`: the unclaimed probability is too
    small for a place among `nodes`. `priority`: a longer n-gram has been found."""
    if count == 0:
        return False
    if np.int64(weights[POLICY]) == Policy.PRIORITY:
        return gram < PRIORITY_GRAM and _longest_match(integers, count) > gram
    return unclaimed(reals, weights) * nodes < _MIN_GAIN


@njit(inline="always")
def _indexed_occurrences(address, sources, live, level, most, context, size, integers, reals, count):
    """Lists where the last GRAMS[level] tokens occur in the session and in fresh texts (source rows up to `live`), and counts
    their votes. Returns the new number of occurrences."""
    if GRAMS[level] > size:
        return count
    before = count
    count = session_occurrences(address, level, most, integers, count)
    count = refused_occurrences(address, integers, before, count)
    if live > FIRST_ROW:
        count = fresh_occurrences(sources, FIRST_ROW, live, level, context, size, integers, count)
    count_votes(integers, reals, before, count, sources)
    return count


@njit
def _occurrences(address, sources, bounds, context, size, nodes, weights, intervals, integers, reals):
    """Searches all tiers, longest n-grams first. Returns the number of occurrences.

    If the session and fresh texts claim enough, segments are searched for longer matches alone."""
    live, prior, end = bounds
    most = min(SAMPLES, _MIN_SAMPLES + 2 * nodes)
    count = _indexed_occurrences(
        address, sources, live, LEVELS - 1, most, context, size, integers, reals, np.int64(0)
    )
    shortest = FIRST_PREFIX
    if _is_enough(GRAMS[LEVELS - 1], nodes, count, weights, integers, reals):
        match = _longest_match(integers, count)
        while shortest < len(PREFIXES) and PREFIXES[shortest] <= match:
            shortest += 1
    longest_live = longest_prefix(sources, live, prior, shortest, most, context, size, intervals[0])
    longest_prior = longest_prefix(sources, prior, end, shortest, most, context, size, intervals[1])
    longest = max(longest_live, longest_prior)
    for place in range(max(LEVELS - 2, longest), -1, -1):
        gram = PREFIXES[place]
        if gram > size:
            continue
        if place != longest and _is_enough(gram, nodes, count, weights, integers, reals):
            break
        if place < LEVELS - 1:
            count = _indexed_occurrences(
                address, sources, live, place, most, context, size, integers, reals, count
            )
        before = count
        count = segment_occurrences(
            sources, live, prior, place, longest_live, most, context, size, intervals[0], integers, count
        )
        count = segment_occurrences(
            sources, prior, end, place, longest_prior, most, context, size, intervals[1], integers, count
        )
        count_votes(integers, reals, before, count, sources)
    return count


@kernel
def run_batch(requests, entries, appended, tables, weights, integers, reals, tokens, parents, probs, tiers):
    """Appends and drafts for each row of requests (int64 [batch, REQUEST_FIELDS]), in order. After the first `entries`
    they are queries: what they append is not kept, what they draft is not counted.

    appended: int32, the tokens of all entries and then of all queries. tables: copies of `source_table`s, one after the other,
    whose rows of the session are overwritten. tokens, parents: int32, probs: float32, tiers: uint8, each as long as the sum of the
    budgets."""
    context = integers[_CONTEXT]
    count = integers[COUNTERS_ROW]
    scratch = np.int64(integers[_DESCRIPTOR].ctypes.data)  # an unsigned address would become a float
    intervals = integers[_INTERVALS, : 4 * len(PREFIXES) * MAX_SEGMENTS].reshape(
        (2, len(PREFIXES), MAX_SEGMENTS, 2)
    )
    for row in range(len(requests)):
        request, tentative = requests[row], row >= entries
        request[DRAFTED] = request[OUTPUT]
        address = request[SESSION]
        if address == 0:
            continue
        if tentative:
            follow_with(address, appended, request[BEGIN], request[END], scratch)
            address = scratch
        descriptor = view_i64(address, DESCRIPTOR_FIELDS)
        if request[BEGIN] < request[END] and not tentative:
            if descriptor[DRAFT_NODES] > 0:
                _count_accepted(descriptor, appended, request[BEGIN], request[END], count)
            append_tokens(address, appended, request[BEGIN], request[END])
        if request[NODES] == 0:
            continue
        size = _context(descriptor, request[TEXT_START], context)
        begin, end = request[OUTPUT], request[OUTPUT] + request[NODES]
        if size > 0:
            sources = tables[request[FIRST_SOURCE] : request[LAST_SOURCE]]
            live, prior = _borders(sources)
            bounds = live, prior, len(sources)
            sources[SESSION_ROW, TOKENS] = descriptor[BUFFER]
            sources[SESSION_ROW, OWNER] = request[SESSION]
            sources[REJECTED_ROW, TOKENS] = descriptor[REFUSED]
            found = _occurrences(
                address, sources, bounds, context, size, request[NODES], weights, intervals, integers, reals
            )
            budget = request[NODES], request[DEPTH], request[CHILDREN]
            out = tokens[begin:end], parents[begin:end], probs[begin:end], tiers[begin:end]
            length = descriptor[LENGTH]
            if np.int64(weights[POLICY]) == Policy.PRIORITY:
                size = draft_chain(integers, found, sources, length, weights, budget, *out)
            else:
                size = grow_tree(integers, reals, found, sources, length, weights, budget, *out)
        end = request[DRAFTED] = begin + size
        if not tentative:
            _count_nodes(tiers[begin:end], count)
            _keep_draft(descriptor, tokens[begin:end], parents[begin:end], tiers[begin:end])
