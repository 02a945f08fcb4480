"""A text that a request brought along, because its output is likely to follow it, and where the output stands in it.

The place is a cursor: the reference's token that is expected next. While the output says that token the cursor moves on. Where the
output departs from the reference (an edit), the cursor is put behind the text that agrees longest with the output's end. Agreement near
the cursor counts as if it were NEAR tokens longer: an edit is most often followed by what stood behind it.
"""

from __future__ import annotations

import numba
import numpy as np

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from sglang_patches.ledger.usage import REFERENCE

SEPARATOR = -1  # between the texts of a reference, and behind the last
LONGEST = 16  # agreement of more tokens counts like this
NEAR, BEFORE, AHEAD = 2, 16, 128  # near the cursor: so many tokens before and ahead of it
SHORTEST = 3  # agreement that is worth a draft
VISITED = 256  # places that are compared before the cursor and behind it, the nearest: a step waits for them
AT_BEGINNING = 2  # what the beginning of a reference counts as, before the output has a token
# Chance that the output says the reference's next token, by tokens of agreement, before the request has shown any: as measured in
# edits of Python files, but for the beginning (docs/optimisations.md).
PRIOR = np.array(
    [0, 0, 0.5, 0.33, 0.65, 0.77, 0.83, 0.84, 0.86, 0.9, 0.92, 0.93, 0.95, 0.96, 0.97, 0.97, 0.99]
)
WEIGHT = 4.0  # cases that it counts for
MEMORY = 64.0  # cases that a chance follows
LEAST_CHANCE = 0.01  # of a path that is drafted
_AT, _RUN = range(2)


class Reference:
    """A reference of one request.

    tokens: int32, each text followed by a SEPARATOR.
    """

    __slots__ = ("_came", "_order", "_place", "_read", "_seen", "_sorted", "_tokens")

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens
        self._order = np.argsort(tokens, kind="stable")  # the places of a token are together, ascending
        self._sorted = tokens[self._order]
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forgets the output."""
        self._place = np.array([0, AT_BEGINNING], np.int64)
        self._seen = np.full(LONGEST + 1, WEIGHT)
        self._came = WEIGHT * PRIOR
        self._read = 0

    def follow(self, output: np.ndarray) -> None:
        """Reads on in the output.

        output: int32, all of it; what was read before is the same.
        """
        text = self._tokens, self._order, self._sorted
        _follow(text, output, self._read, self._place, self._seen, self._came)
        self._read = len(output)

    def tree(self, nodes: int) -> DraftTree:
        """What the reference says next, with the chances that the output says it too: a chain of at most `nodes` nodes."""
        at, run = self._place.tolist()
        tokens = self._tokens[at : at + nodes] if run else self._tokens[:0]
        steps = np.arange(len(tokens))
        chances = np.cumprod((self._came / self._seen)[np.minimum(run + steps, LONGEST)])
        ends = np.flatnonzero((tokens == SEPARATOR) | (chances < LEAST_CHANCE))
        size = int(ends[0]) if len(ends) else len(tokens)
        if not size:
            return EMPTY_TREE
        return DraftTree(
            tokens[:size],
            (steps[:size] - 1).astype(np.int32),
            chances[:size].astype(np.float32),
            np.full(size, REFERENCE, np.uint8),
        )


@numba.njit(cache=True, nogil=True)
def _follow(text, output, begin, place, seen, came):  # pragma: no cover
    """Moves the cursor over output[begin:] and learns, by agreement, how often the output says the reference's next token.

    text: the reference's tokens, the order that sorts them, and them sorted.
    """
    reference = text[0]
    for last in range(begin, len(output)):
        at, run = place[_AT], place[_RUN]
        came_true = reference[at] == output[last]
        if run > 0 and reference[at] != SEPARATOR:
            seen[run] += 1
            came[run] += came_true
            if seen[run] > MEMORY:
                seen[run] /= 2
                came[run] /= 2
        if run > 0 and came_true:
            place[_AT], place[_RUN] = at + 1, min(run + 1, LONGEST)
        else:
            _join(text, output, last, place)


@numba.njit(cache=True, nogil=True)
def _join(text, output, last, place):  # pragma: no cover
    """Puts the cursor behind the text that agrees longest with the end of output[: last + 1], of several behind the nearest. It stays
    where it is, at no agreement, if none is worth a draft."""
    reference, order, in_order = text
    was = place[_AT]
    best, best_at = SHORTEST - 1, was
    low, high = np.searchsorted(in_order, output[last]), np.searchsorted(in_order, output[last], "right")
    middle = low + np.searchsorted(order[low:high], was)
    for at in range(max(low, middle - VISITED), min(high, middle + VISITED)):
        end = order[at]
        if reference[end + 1] == SEPARATOR:
            continue
        size = 1
        while size < LONGEST and size <= min(end, last) and reference[end - size] == output[last - size]:
            size += 1
        there = end + 1
        if was - BEFORE <= there <= was + AHEAD:
            size += NEAR
        if size > best or (size == best >= SHORTEST and abs(there - was) < abs(best_at - was)):
            best, best_at = size, there
    place[_AT], place[_RUN] = best_at, min(best, LONGEST) if best >= SHORTEST else 0
