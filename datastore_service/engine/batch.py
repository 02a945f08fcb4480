"""One kernel call for a whole step: append what each session accepted, then draft for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    VOCAB,
    WIDTH,
    fresh_occurrences,
    refused_occurrences,
    segment_occurrences,
    session_occurrences,
)
from datastore_service.engine.segment import MAX_VOCAB, Segment
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
from datastore_service.protocol.tree import EMPTY_TREE, DraftTree, Tier
from datastore_service.protocol.types import Budget

# Fields of a request: the session's descriptor, its part of the tokens, where its known text starts, the budget, where its
# nodes are written and, from the kernel, where they end. Address 0: nothing to do.
SESSION, BEGIN, END, TEXT_START, NODES, DEPTH, CHILDREN, OUTPUT, DRAFTED = range(9)
REQUEST_FIELDS = 9
_CONTEXT, _INTERVALS, _COUNTS, _DESCRIPTOR = range(INTEGER_ROWS, INTEGER_ROWS + 4)
_SCRATCH_ROWS = INTEGER_ROWS + 4
_TIERS = max(Tier) + 1
FEWEST = 8  # occurrences of one prefix length and tier that are looked at, and two more for each node wanted
WORTH = 2.0  # unclaimed probability times nodes below which no shorter prefix is looked up


@dataclass(frozen=True, slots=True)
class Counts:
    """drafts: asked for. By Tier: drafts with a node of it, nodes of it, and those that came true."""

    drafts: int
    hits: list[int]
    drafted: list[int]
    accepted: list[int]


class Work:
    """One kernel call at a time: what it is asked, and its working memory, 2 MB of which it touches a few KB.

    Use: `begin`, then `add` or `add_nothing` for each entry, then for each query, then `run`."""

    __slots__ = ("_fields", "_integers", "_output", "_reals")

    def __init__(self) -> None:
        self._integers = np.zeros((_SCRATCH_ROWS, COLUMNS), dtype=np.int64)
        self._reals = np.zeros((REAL_ROWS, COLUMNS), dtype=np.float64)

    def begin(self) -> None:
        self._fields: list[int] = []  # of all requests
        self._output = 0

    def add_nothing(self) -> None:
        """An entry that neither appends nor drafts, or a query that is not answered."""
        self._fields += (0, 0, 0, 0, 0, 0, 0, self._output, 0)

    def add(self, index: SessionIndex, begin: int, end: int, budget: Budget) -> None:
        """index: has reserved room for the tokens [begin, end) of those that `run` gets, and for the budget's nodes."""
        nodes = budget.nodes
        self._fields += (
            index.address, begin, end, index.text_start, nodes, budget.depth, budget.children, self._output, 0
        )  # fmt: skip
        self._output += nodes

    def run(
        self, entries: int, appended: np.ndarray, table: np.ndarray, weights: np.ndarray
    ) -> list[DraftTree]:
        """A tree for each entry and query. entries: how many were added before the first query. appended: int32, the new
        tokens of all, then the queries'. table: of `source_table`, whose texts the caller keeps alive meanwhile."""
        requests = np.array(self._fields, dtype=np.int64).reshape(-1, REQUEST_FIELDS)
        tokens = np.empty(self._output, dtype=np.int32)
        parents = np.empty(self._output, dtype=np.int32)
        probs = np.empty(self._output, dtype=np.float32)
        tiers = np.empty(self._output, dtype=np.uint8)
        run_batch(
            requests, entries, appended, table.copy(), weights, self._integers, self._reals, tokens, parents, probs, tiers
        )  # fmt: skip
        return [
            DraftTree(tokens[i:j], parents[i:j], probs[i:j], tiers[i:j]) if j > i else EMPTY_TREE
            for i, j in requests[:, OUTPUT : DRAFTED + 1].tolist()
        ]

    @property
    def counts(self) -> np.ndarray:
        return self._integers[_COUNTS, : 1 + 3 * _TIERS]


def counts(works: Sequence[Work]) -> Counts:
    """Over all calls so far."""
    total = np.zeros(1 + 3 * _TIERS, dtype=np.int64)
    for work in list(works):
        total += work.counts
    hits, drafted, accepted = total[1:].reshape(3, _TIERS).tolist()
    return Counts(int(total[0]), hits, drafted, accepted)


def source_table(
    fresh: tuple[SessionIndex, ...], live: tuple[Segment, ...], prior: tuple[Segment, ...]
) -> np.ndarray:
    """int64 [FIRST_ROW + sources, SOURCE_FIELDS]: rows for the session and what was refused in it, then fresh texts, live
    and prior segments.

    The caller keeps the sources alive as long as the table is used."""
    table = np.zeros((FIRST_ROW + len(fresh) + len(live) + len(prior), SOURCE_FIELDS), dtype=np.int64)
    table[:, VOCAB] = MAX_VOCAB
    table[SESSION_ROW, [WIDTH, STOP, TIER]] = 4, INDEX_STOP, Tier.SESSION
    table[REJECTED_ROW, [WIDTH, STOP, TIER]] = 4, INDEX_STOP, Tier.REJECTED
    for row, index in enumerate(fresh, start=FIRST_ROW):
        table[row, [TOKENS, WIDTH, STOP, TIER, INDEX]] = (
            address_of(index.tokens), 4, INDEX_STOP, Tier.LIVE, index.address,
        )  # fmt: skip
    for row, segment in enumerate(live + prior, start=FIRST_ROW + len(fresh)):
        table[row, :TIER] = segment.descriptor()
        table[row, VOCAB] = segment.vocab_size
        table[row, TIER] = Tier.LIVE if row < FIRST_ROW + len(fresh) + len(live) else Tier.PRIOR
    return table


@njit(inline="always")
def _context(descriptor, text_start, context):
    """Copies the last tokens of the request's own text. Returns how many, at most MAX_MATCH."""
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
            count[1 + 2 * _TIERS + draft[DRAFT_TIERS * room + node]] += 1
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
def _enough(gram, nodes, count, weights, integers, reals):
    """Whether occurrences of no more than the last `gram` tokens would change next to nothing: for `weighted`, if what is
    left to claim is too little for places among `nodes`; for `priority`, if a longer n-gram has been found."""
    if count == 0:
        return False
    if np.int64(weights[POLICY]) == Policy.PRIORITY:
        longest = np.int64(0)
        for i in range(count):
            longest = max(longest, integers[MATCH, i])
        return gram < PRIORITY_GRAM and longest > gram
    return unclaimed(reals, weights) * nodes < WORTH


@njit
def _occurrences(address, sources, bounds, context, size, nodes, weights, intervals, integers, reals):
    """Retrieval from all tiers, the longest n-grams first; returns how many occurrences there are."""
    live, prior, end = bounds
    most = min(SAMPLES, FEWEST + 2 * nodes)
    count = np.int64(0)
    longer_live = longer_prior = MAX_MATCH + 1
    for level in range(LEVELS - 1, -1, -1):
        gram = GRAMS[level]
        if gram > size:
            continue
        if _enough(gram, nodes, count, weights, integers, reals):
            break
        before = count
        count = session_occurrences(address, level, most, integers, count)
        count = refused_occurrences(address, integers, before, count)
        if live > FIRST_ROW:
            count = fresh_occurrences(sources, FIRST_ROW, live, level, context, size, integers, count)
        if gram <= FIRST_GRAM and prior > live:
            count, longer_live = segment_occurrences(
                sources, live, prior, gram, longer_live, most, context, size, intervals, integers, count
            )
        if gram <= FIRST_GRAM and end > prior:
            count, longer_prior = segment_occurrences(
                sources, prior, end, gram, longer_prior, most, context, size, intervals, integers, count
            )
        count_votes(integers, reals, before, count, sources)
    return count


@kernel
def run_batch(requests, entries, appended, sources, weights, integers, reals, tokens, parents, probs, tiers):
    """Appends and drafts for each row of requests (int64 [batch, REQUEST_FIELDS]), in order. After the first `entries`
    they are queries: what they append is not kept, what they draft is not counted.

    appended: int32, the tokens of all. sources: see source_table; the session's rows are overwritten, so a call owns
    its copy. tokens, parents: int32, probs: float32, tiers: uint8, each of the total budget."""
    live, prior = _borders(sources)
    bounds = live, prior, len(sources)
    context = integers[_CONTEXT]
    count = integers[_COUNTS]
    scratch = np.int64(integers[_DESCRIPTOR].ctypes.data)  # unsigned, it would make floats of addresses
    intervals = integers[_INTERVALS, : 4 * MAX_SEGMENTS].reshape((2, MAX_SEGMENTS, 2))
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
            sources[SESSION_ROW, TOKENS] = descriptor[BUFFER]
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
