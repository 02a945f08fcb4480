"""Makes a draft tree from occurrences, by one of two policies.

`weighted` (SSSD, section 3.1.4 and Algorithm 3). Every occurrence votes for the text that follows it. Votes are grouped
by match length and tier: longest match first, then nearest tier. A group claims a share of the probability that the
groups before it have left: its *trust*, reduced if it has few occurrences. Its occurrences divide the share. The
probability that no group claims is the estimate that all are wrong. So a node's probability is a sum over all sources;
Algorithm 3 takes the largest of separate estimates instead.

The tree grows best first: the likeliest candidate becomes a node, and the occurrences that agree with it are split by
their next token into its candidates. Below the first level a group's share is multiplied by *hold*, the estimated
probability that the target keeps agreeing. Only drafted nodes are split, and splitting permutes a range of indices in
place: no trie is built.

A token that the target refused at an earlier occurrence of the context (rejected tier) votes too, after all others. If
others vote for it as the first token, their votes are multiplied by *keep*, because it is less likely to be right.

`priority` (Double, Algorithm 3). One chain: the text after the longest n-gram that occurs anywhere, n at most 3. Among
equal n the tier decides, in the order prior, live, session, rejected.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numba import njit

from datastore_service.engine.memory import load_token, view_i32
from datastore_service.engine.retrieval import (
    CURSOR,
    MATCH,
    MAX_MATCH,
    MAX_OCCURRENCES,
    REJECTED_ROW,
    SESSION_ROW,
    SOURCE,
    STEP,
    STOP,
    TIER,
    TOKENS,
    VOCAB,
    WIDTH,
)
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import MAX_DEPTH

MATCH_CLASSES = (1, 2, 3, 4, 6, 10, 16, 32, 64, 128)  # shortest match of each class
CLASSES = len(MATCH_CLASSES)
TIERS = (
    Tier.SESSION,
    Tier.LIVE,
    Tier.PRIOR,
    Tier.REJECTED,
)  # order in which equally long matches claim probability
PRIORITY_GRAM = 3  # Double, section 5.1

Row = tuple[float, ...]


class Policy(IntEnum):
    """How a draft is made from occurrences."""

    WEIGHTED = 0
    PRIORITY = 1


@dataclass(frozen=True, slots=True)
class FusionWeights:
    """Constants of the fusion. Each row has one value for each class of MATCH_CLASSES, shortest match first.

    trust_*: share of the remaining probability that a tier's occurrences of that match length claim.
    hold_*: probability that the target follows them one token further, by match length including drafted tokens.
    keep: factor on the other tiers' votes for a token that was refused after a match of that length.
    doubt: number of occurrences at which a group claims half of its trust (0: one occurrence claims all of it).
    floor: candidates less likely than this are not drafted.
    odds: factor on the odds of every estimate that is returned. It makes the probabilities of a tree add up to its
    accepted tokens, and does not change the order of candidates.

    The paper's constants in these terms: trust 0.6 for the session and 1 for the datastore; hold 0.6 + 0.1 P for a
    session match of length P, 1 for the datastore; no doubt, no floor, odds 1. The defaults were found by coordinate
    search for accepted tokens and squared error of the probabilities, on replays of held-out Python sources and
    grade-school mathematics. On other held-out documents, at 16 nodes, they accept more tokens a step than the hand-set
    values that the search started from: 2.72 against 2.57 (Python), 2.42 against 2.20 (mathematics), 1.81 against 1.79
    (Python without a prior). The live tier has the prior's values. Those of long matches are from a second search, on
    near-verbatim text and C++ too (docs/optimisations.md, Long matches).
    """

    trust_session: Row = (0.35, 0.37, 0.52, 0.68, 0.68, 0.90, 0.95, 0.95, 0.95, 0.95)
    trust_live: Row = (0.45, 0.35, 0.36, 0.40, 0.58, 0.60, 0.80, 0.85, 0.92, 0.95)
    trust_prior: Row = (0.45, 0.35, 0.36, 0.40, 0.58, 0.60, 0.80, 0.85, 0.92, 0.95)
    hold_session: Row = (0.60, 0.80, 0.75, 0.70, 0.80, 0.80, 0.98, 0.98, 0.98, 0.98)
    hold_live: Row = (0.60, 0.65, 0.60, 0.60, 0.62, 0.80, 0.93, 0.98, 0.985, 0.99)
    hold_prior: Row = (0.60, 0.65, 0.60, 0.60, 0.62, 0.80, 0.93, 0.98, 0.985, 0.99)
    trust_rejected: Row = (0.01, 0.01, 0.03, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01)
    hold_rejected: Row = (0.60, 0.65, 0.60, 0.60, 0.62, 0.72, 0.97, 0.97, 0.97, 0.97)
    keep: Row = (1.0, 0.9, 0.6, 0.55, 0.65, 0.65, 0.65, 0.65, 0.65, 0.65)
    policy: Policy = Policy.WEIGHTED
    doubt: float = 0.7
    floor: float = 0.002
    odds: float = 1.3

    def __post_init__(self) -> None:
        for name in _ROW_NAMES:
            row = getattr(self, name)
            if len(row) != CLASSES or not all(0 <= value <= 1 for value in row):
                raise ValueError(f"{name}: not {CLASSES} values in [0, 1]: {row}")
        if self.doubt < 0 or not 0 <= self.floor < 1:
            raise ValueError(f"doubt, floor: {self.doubt}, {self.floor} are outside [0, inf), [0, 1)")
        if self.odds <= 0:
            raise ValueError(f"odds: {self.odds} is not positive")

    def packed(self) -> np.ndarray:
        """float64 [4 + (2 * tiers + 1) * classes] for the kernel: doubt, floor, odds, policy, then the rows."""
        values = [self.doubt, self.floor, self.odds, float(self.policy)]
        for name in _ROW_NAMES:
            values += getattr(self, name)
        return np.array(values, dtype=np.float64)


_ROW_NAMES = (*(f"{kind}_{tier.name.lower()}" for kind in ("trust", "hold") for tier in TIERS), "keep")
_CLASS_OF = np.zeros(MAX_MATCH + MAX_DEPTH + 1, dtype=np.int64)
for _index, _shortest in enumerate(MATCH_CLASSES):
    _CLASS_OF[_shortest:] = _index
_RANK_OF = np.zeros(max(Tier) + 1, dtype=np.int64)  # a tier's place in TIERS
for _index, _tier in enumerate(TIERS):
    _RANK_OF[_tier] = _index
_TIER_OF = np.array(TIERS, dtype=np.int64)
RANKS = len(TIERS)
_DOUBT, _FLOOR, _ODDS, POLICY, _ROWS = range(5)  # of packed weights
_REJECTED = TIERS.index(Tier.REJECTED)
# Double's order, the first tier highest.
_PRIORITY_OF = np.array([[Tier.REJECTED, Tier.SESSION, Tier.LIVE, Tier.PRIOR].index(tier) for tier in TIERS])

# Scratch: int64 [INTEGER_ROWS, COLUMNS] and float64 [REAL_ROWS, COLUMNS]; a name is a row.
COLUMNS = 8192 + 8  # not a power of two, or the rows would share cache sets
_SLOTS = 4096  # hash table from a token to its group, at most a quarter full
assert MAX_OCCURRENCES <= _SLOTS // 4
_ORDER, _MOVED, _NEXT, _GROUP, _TABLE, _TAKEN = range(4, 10)
_GROUP_TOKEN, _GROUP_SIZE, _GROUP_BEST, _GROUP_REFUSED = range(10, 14)
_TOKEN, _LOW, _HIGH, _PARENT, _DEPTH, _RANK, _BEST, _HEAP = range(14, 22)  # of a candidate
_NODE_CHILDREN, _OCCURRENCE_RANK = range(22, 24)
INTEGER_ROWS = 24
_VOTE, _PROBABILITY, _GROUP_VOTE, _SHARES, _GROUP_RANK_VOTE = range(5)
REAL_ROWS = _GROUP_RANK_VOTE + RANKS


@njit(inline="always")
def _trust(weights, rank, match_class):
    return weights[_ROWS + rank * CLASSES + match_class]


@njit(inline="always")
def _hold(weights, rank, match):
    return weights[_ROWS + (RANKS + rank) * CLASSES + _CLASS_OF[match]]


@njit(inline="always")
def _keep(weights, match):
    return weights[_ROWS + 2 * RANKS * CLASSES + _CLASS_OF[match]]


@njit
def count_votes(integers, reals, begin, end, sources):
    """Counts occurrences [begin, end) by match class and tier. With begin 0 it resets the counts first."""
    shares = reals[_SHARES]
    if begin == 0:
        shares[: CLASSES * RANKS] = 0.0
    for i in range(begin, end):
        rank = _RANK_OF[sources[integers[SOURCE, i], TIER]]
        integers[_OCCURRENCE_RANK, i] = rank
        shares[_CLASS_OF[integers[MATCH, i]] * RANKS + rank] += integers[STEP, i]


@njit
def unclaimed(reals, weights):
    """The probability that no occurrence counted so far claims."""
    left = 1.0
    for group in range(CLASSES * RANKS - 1, -1, -1):
        number = reals[_SHARES, group]
        if number > 0:
            left *= 1.0 - _trust(weights, group % RANKS, group // RANKS) * number / (number + weights[_DOUBT])
    return left


@njit
def _cast_votes(integers, reals, count, weights):
    """Divides the probability among the counted occurrences: occurrence i gets reals[_VOTE, i]. The sum is at most 1."""
    left, shares = 1.0, reals[_SHARES]
    for match_class in range(CLASSES - 1, -1, -1):
        for rank in range(RANKS):
            number = shares[match_class * RANKS + rank]
            if number > 0:
                share = left * _trust(weights, rank, match_class) * number / (number + weights[_DOUBT])
                left -= share
                shares[match_class * RANKS + rank] = share / number
    for i in range(count):
        group = _CLASS_OF[integers[MATCH, i]] * RANKS + integers[_OCCURRENCE_RANK, i]
        reals[_VOTE, i] = shares[group] * integers[STEP, i]


@njit(inline="always")
def _following(integers, occurrence, sources, length, tokens, parents, node, depth):
    """The token at `depth` in the continuation of an occurrence, or -1 at the end of the document and for an invalid token.

    If a session's continuation reaches the end of the text, it continues with the drafted path itself, which is periodic.
    A refused token has no continuation."""
    row = integers[SOURCE, occurrence]
    cursor = integers[CURSOR, occurrence] + depth
    if row == REJECTED_ROW:
        if depth > 0:
            return np.int64(-1)
        return np.int64(view_i32(sources[row, TOKENS], 2 * cursor + 2)[2 * cursor + 1])
    if row == SESSION_ROW and cursor >= length:
        for _ in range(depth - 1 - (cursor - length)):
            node = parents[node]
        return np.int64(tokens[node])
    token = load_token(sources[row, TOKENS], sources[row, WIDTH], cursor)
    return np.int64(-1) if token == sources[row, STOP] or token >= sources[row, VOCAB] else token


@njit(inline="always")
def _group_of(integers, reals, token, groups):
    """The group of a token; creates one if there is none. Returns the group and the number of groups."""
    slot = (token * 2654435761 >> 7) & (_SLOTS - 1)
    while True:
        group = integers[_TABLE, slot] - 1
        if group < 0:
            integers[_TABLE, slot] = groups + 1
            integers[_TAKEN, groups] = slot
            integers[_GROUP_TOKEN, groups] = token
            integers[_GROUP_SIZE, groups] = 0
            integers[_GROUP_BEST, groups] = 0
            integers[_GROUP_REFUSED, groups] = 0
            reals[_GROUP_VOTE, groups] = 0.0
            for rank in range(RANKS):
                reals[_GROUP_RANK_VOTE + rank, groups] = 0.0
            return groups, groups + 1
        if integers[_GROUP_TOKEN, group] == token:
            return group, groups
        slot = (slot + 1) & (_SLOTS - 1)


@njit(inline="always")
def _gather(integers, reals, sources, length, tokens, parents, low, high, node, depth):
    """Groups the occurrences order[low:high] by the token that follows at `depth`. Returns the number of groups."""
    groups = 0
    for i in range(low, high):
        occurrence = integers[_ORDER, i]
        token = _following(integers, occurrence, sources, length, tokens, parents, node, depth)
        if token < 0:
            integers[_GROUP, i] = -1
            continue
        group, groups = _group_of(integers, reals, token, groups)
        vote = reals[_VOTE, occurrence]
        integers[_GROUP, i] = group
        integers[_GROUP_SIZE, group] += 1
        match, rank = integers[MATCH, occurrence], integers[_OCCURRENCE_RANK, occurrence]
        best = _GROUP_REFUSED if rank == _REJECTED else _GROUP_BEST
        integers[best, group] = max(match, integers[best, group])
        reals[_GROUP_VOTE, group] += vote
        reals[_GROUP_RANK_VOTE + rank, group] += vote
    for group in range(groups):
        integers[_TABLE, integers[_TAKEN, group]] = 0
    return groups


@njit(inline="always")
def _permute(integers, low, high, groups):
    """Makes each group's occurrences adjacent. Afterwards _NEXT[group] is the end of the group."""
    at = low
    for group in range(groups):
        integers[_NEXT, group] = at
        at += integers[_GROUP_SIZE, group]
    for i in range(low, high):
        group = integers[_GROUP, i]
        if group >= 0:
            integers[_MOVED, integers[_NEXT, group]] = integers[_ORDER, i]
            integers[_NEXT, group] += 1
    for i in range(low, at):
        integers[_ORDER, i] = integers[_MOVED, i]


@njit(inline="always")
def _demote_refused(integers, reals, groups, weights):
    """Multiplies the votes for refused tokens by *keep*. The vote of the refusal itself counts only if there is no other."""
    for group in range(groups):
        refused = integers[_GROUP_REFUSED, group]
        own = reals[_GROUP_RANK_VOTE + _REJECTED, group]
        if refused > 0 and integers[_GROUP_BEST, group] > 0:
            reals[_GROUP_VOTE, group] = (reals[_GROUP_VOTE, group] - own) * _keep(weights, refused)
            reals[_GROUP_RANK_VOTE + _REJECTED, group] = 0.0
        elif refused > 0:
            integers[_GROUP_BEST, group] = refused


@njit(inline="always")
def _heaviest_rank(reals, group):
    heaviest = 0
    for rank in range(1, RANKS):
        if reals[_GROUP_RANK_VOTE + rank, group] > reals[_GROUP_RANK_VOTE + heaviest, group]:
            heaviest = rank
    return heaviest


@njit(inline="always")
def _push(integers, reals, size, candidate):
    """Puts a candidate on the heap of likeliest candidates. Returns the new size."""
    probability = reals[_PROBABILITY, candidate]
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if reals[_PROBABILITY, integers[_HEAP, above]] >= probability:
            break
        integers[_HEAP, at] = integers[_HEAP, above]
        at = above
    integers[_HEAP, at] = candidate
    return size + 1


@njit(inline="always")
def _pop(integers, reals, size):
    """Removes the heap's top, which the caller has read. Returns the new size."""
    size -= 1
    last = integers[_HEAP, size]
    probability = reals[_PROBABILITY, last]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        right = child + 1
        if right < size:
            ours, theirs = integers[_HEAP, child], integers[_HEAP, right]
            if reals[_PROBABILITY, theirs] > reals[_PROBABILITY, ours]:
                child = right
        if reals[_PROBABILITY, integers[_HEAP, child]] <= probability:
            break
        integers[_HEAP, at] = integers[_HEAP, child]
        at = child
    integers[_HEAP, at] = last
    return size


@njit(inline="always")
def _expand(
    integers,
    reals,
    sources,
    length,
    tokens,
    parents,
    weights,
    low,
    high,
    node,
    depth,
    parent,
    used,
    heap_size,
):
    """Splits a range of occurrences into candidates below `node`. parent: the candidate that became the node (-1: root).

    Returns the numbers of candidates and of heap elements."""
    groups = _gather(integers, reals, sources, length, tokens, parents, low, high, node, depth)
    _permute(integers, low, high, groups)
    scale = 1.0
    if parent < 0:
        _demote_refused(integers, reals, groups, weights)
    else:
        total = 0.0
        for group in range(groups):
            total += reals[_GROUP_VOTE, group]
        if total <= 0.0:
            return used, heap_size
        hold = _hold(weights, integers[_RANK, parent], integers[_BEST, parent] + depth)
        scale = hold * reals[_PROBABILITY, parent] / total
    for group in range(groups):
        probability = reals[_GROUP_VOTE, group] * scale
        if probability < weights[_FLOOR] or used == COLUMNS:
            continue
        end = integers[_NEXT, group]
        integers[_TOKEN, used] = integers[_GROUP_TOKEN, group]
        integers[_LOW, used] = end - integers[_GROUP_SIZE, group]
        integers[_HIGH, used] = end
        integers[_PARENT, used] = node
        integers[_DEPTH, used] = depth + 1
        integers[_RANK, used] = _heaviest_rank(reals, group)
        integers[_BEST, used] = integers[_GROUP_BEST, group]
        reals[_PROBABILITY, used] = probability
        heap_size = _push(integers, reals, heap_size, used)
        used += 1
    return used, heap_size


@njit
def grow_tree(integers, reals, count, sources, length, weights, budget, tokens, parents, probs, tiers):
    """Best-first merge of `count` occurrences (integers[:4], counted by `count_votes`) under a budget.

    length: tokens of the session. budget: (nodes, depth, children). tokens, parents: int32 [budget nodes], probs:
    float32, tiers: uint8. Returns the number of nodes."""
    limit, deepest, widest = budget
    _cast_votes(integers, reals, count, weights)
    for i in range(count):
        integers[_ORDER, i] = i
    used, heap_size = _expand(
        integers, reals, sources, length, tokens, parents, weights, 0, count, -1, 0, -1, 0, 0
    )  # fmt: skip
    size, root_children = 0, 0
    while heap_size > 0 and size < limit:
        top = integers[_HEAP, 0]
        heap_size = _pop(integers, reals, heap_size)
        parent = integers[_PARENT, top]
        if parent < 0:
            if root_children == widest:
                continue
            root_children += 1
        else:
            if integers[_NODE_CHILDREN, parent] == widest:
                continue
            integers[_NODE_CHILDREN, parent] += 1
        tokens[size], parents[size] = integers[_TOKEN, top], parent
        probability = reals[_PROBABILITY, top]
        probs[size] = weights[_ODDS] * probability / (1.0 + (weights[_ODDS] - 1.0) * probability)
        tiers[size] = _TIER_OF[integers[_RANK, top]]
        integers[_NODE_CHILDREN, size] = 0
        size += 1
        depth = integers[_DEPTH, top]
        if depth < deepest and size < limit:
            used, heap_size = _expand(
                integers, reals, sources, length, tokens, parents, weights, integers[_LOW, top], integers[_HIGH, top],
                size - 1, depth, top, used, heap_size,
            )  # fmt: skip
    return size


@njit
def draft_chain(integers, count, sources, length, weights, budget, tokens, parents, probs, tiers):
    """The `priority` policy. Arguments and result are those of `grow_tree`. Among occurrences of equal rank it takes the
    first with the longest match."""
    limit, deepest, _ = budget
    chosen, best = np.int64(-1), np.int64(-1)
    for i in range(count):
        rank, match = _RANK_OF[sources[integers[SOURCE, i], TIER]], integers[MATCH, i]
        standing = (min(match, PRIORITY_GRAM) * RANKS + _PRIORITY_OF[rank]) * (MAX_MATCH + 1) + match
        if standing > best:
            chosen, best = i, standing
    size = 0
    if chosen < 0:
        return size
    rank, match = _RANK_OF[sources[integers[SOURCE, chosen], TIER]], integers[MATCH, chosen]
    probability = _trust(weights, rank, _CLASS_OF[match])
    while size < min(limit, deepest):
        token = _following(integers, chosen, sources, length, tokens, parents, size - 1, size)
        if token < 0:
            break
        tokens[size], parents[size] = token, size - 1
        probs[size] = weights[_ODDS] * probability / (1.0 + (weights[_ODDS] - 1.0) * probability)
        tiers[size] = _TIER_OF[rank]
        size += 1
        probability *= _hold(weights, rank, match + size)
    return size
