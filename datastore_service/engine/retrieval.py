"""Where the current context occurred before: in the session (SSSD, Algorithm 1), in fresh text and in segments
(Algorithm 2).

All write *occurrences*: places in some text whose preceding tokens equal the end of the context. An occurrence knows
its source, the place of the token after it, and its *match length*, how far back the equality goes (at most
`MAX_MATCH`). Each place is listed once, under its longest match. No continuation is copied.

A source is a row of an int64 table; fields below. The session is row 0; the live tier's fresh texts follow, newest
first, then segments grouped by tier.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from datastore_service.engine.memory import load_token, read_i64, view_i32, view_i64, view_u32
from datastore_service.engine.segment import BLOCK, LEAD
from datastore_service.engine.session import GRAMS, LENGTH, LEVELS, SEPARATOR, find_gram, mix, text_of

MAX_MATCH = 32

# Fields of a source: the segment's descriptor, its tier, and of fresh text the address of its index's descriptor.
TOKENS, WIDTH, STOP, SUFFIXES, ROWS, LEADS, TIER, INDEX = range(8)
SOURCE_FIELDS = 8
INDEX_STOP = (1 << 32) - 1  # SEPARATOR read as unsigned

# Fields of an occurrence: source row, position of the next token, match length, interval rows per sampled row.
SOURCE, CURSOR, MATCH, STEP = range(4)
OCCURRENCE_FIELDS = 4

SESSION_WALK = 32  # occurrences visited for each n-gram length
FRESH_WALK = 16  # the same, all fresh texts together
SAMPLES = 32  # rows taken from an interval, all segments of a tier together; the paper takes 100; 64 were slower and no better
ENOUGH = 24  # occurrences after which no shorter prefix is tried (the paper: 50)
FIRST_GRAM = 4  # length of the first searched prefix, the paper's P
LONG_GRAM = 8  # searched too where the first interval is larger than the sample
MAX_SEGMENTS = 64  # of one tier; the paper caps them at 8
MAX_OCCURRENCES = LEVELS * (SESSION_WALK + FRESH_WALK) + 2 * (FIRST_GRAM + 1) * SAMPLES


@njit
def session_occurrences(address, occurrences):
    """Lists earlier occurrences of the session's last n-grams, longest n-gram first, newest first. Returns how many."""
    descriptor = view_i64(address, 5)
    tokens, links = text_of(descriptor)
    last = descriptor[LENGTH] - 1
    count = 0
    for level in range(LEVELS - 1, -1, -1):
        longer = GRAMS[level + 1] if level + 1 < LEVELS else MAX_MATCH + 1
        end = np.int64(links[level, last])
        for _ in range(SESSION_WALK):
            if end < 0:
                break
            match = GRAMS[level]
            while match < MAX_MATCH and match <= end and tokens[end - match] == tokens[last - match]:
                if tokens[end - match] == SEPARATOR:
                    break
                match += 1
            if match < longer and tokens[end + 1] != SEPARATOR:
                occurrences[SOURCE, count] = 0
                occurrences[CURSOR, count] = end + 1
                occurrences[MATCH, count] = match
                occurrences[STEP, count] = 1
                count += 1
            end = np.int64(links[level, end])
    return count


@njit
def fresh_occurrences(sources, begin, end, context, size, occurrences, count):
    """Lists where the context's last n-grams end in fresh texts (source rows begin..end), longest n-gram first, newest
    first. Another thread may be appending: what it has not finished is not seen. Returns the number of occurrences
    after it."""
    longer = MAX_MATCH + 1
    for level in range(LEVELS - 1, -1, -1):
        if GRAMS[level] > size:
            continue
        hashed = np.uint64(0)
        for back in range(GRAMS[level]):
            hashed = mix(hashed, context[size - 1 - back])
        walked = 0
        for row in range(begin, end):
            walked, count = _walk_fresh(
                sources[row], row, level, hashed, longer, context, size, walked, occurrences, count
            )
        longer = GRAMS[level]
    return count


@njit(inline="always")
def _walk_fresh(source, row, level, hashed, longer, context, size, walked, occurrences, count):
    """One fresh text's part of a level. Matches that reach `longer` were listed before."""
    length = read_i64(source[INDEX], LENGTH)  # complete documents up to here
    descriptor = view_i64(source[INDEX], 5)
    tokens, links = text_of(descriptor)
    _, at = find_gram(descriptor, tokens, hashed, level, context, size - 1)
    while at >= 0 and walked < FRESH_WALK:
        if at + 1 < length and tokens[at + 1] != SEPARATOR:
            match = GRAMS[level]
            while match < size and match <= at and np.int64(tokens[at - match]) == context[size - 1 - match]:
                match += 1
            if match < longer:
                occurrences[SOURCE, count] = row
                occurrences[CURSOR, count] = at + 1
                occurrences[MATCH, count] = match
                occurrences[STEP, count] = 1
                count += 1
            walked += 1
        at = np.int64(links[level, at])
    return walked, count


@njit(inline="always")
def _leads_below(source, query, size, or_equal):
    """How many of the lead table's rows are below the query (or begin with it)."""
    blocks = (source[ROWS] + BLOCK - 1) // BLOCK
    leads = view_u32(source[LEADS], blocks * LEAD)
    compared = min(size, LEAD)
    low, high = np.int64(0), blocks
    while low < high:
        middle = (low + high) >> 1
        order = np.int64(0)
        for i in range(compared):
            order = np.int64(leads[middle * LEAD + i]) - query[i]
            if order != 0:
                break
        if order < 0 or (or_equal and order == 0):
            low = middle + 1
        else:
            high = middle
    return low


@njit(inline="always")
def _suffix_order(source, position, query, size):
    """Negative, zero or positive: the suffix is below, begins with, or is above the query.

    No bounds check: text ends with a separator, which no query contains."""
    order = np.int64(0)
    for i in range(size):
        order = load_token(source[TOKENS], source[WIDTH], position + i) - query[i]
        if order != 0:
            break
    return order


@njit(inline="always")
def _rows_below(source, suffixes, query, size, low, high, or_equal):
    """Binary search in suffix array rows [low, high) for the first row not below the query."""
    while low < high:
        middle = (low + high) >> 1
        order = _suffix_order(source, np.int64(suffixes[middle]), query, size)
        if order < 0 or (or_equal and order == 0):
            low = middle + 1
        else:
            high = middle
    return low


@njit
def interval(source, query, size):
    """First and last + 1 suffix array row of the suffixes that begin with query[:size]; size >= 1.

    source: int64 [SOURCE_FIELDS]. query: int64, without the separator value."""
    rows = source[ROWS]
    for i in range(size):
        if query[i] == source[STOP]:
            return np.int64(0), np.int64(0)
    suffixes = view_i32(source[SUFFIXES], rows)
    below = _leads_below(source, query, size, False)
    upto = _leads_below(source, query, size, True)
    start = max(np.int64(0), (below - 1) * BLOCK)
    end = min(rows, (below if size <= LEAD else upto) * BLOCK)
    first = _rows_below(source, suffixes, query, size, start, end, False)
    start = max(first, (upto - 1) * BLOCK) if size <= LEAD else first
    last = _rows_below(source, suffixes, query, size, start, min(rows, upto * BLOCK), True)
    return first, last


@njit(inline="always")
def _match_length(source, position, context, size, gram):
    """How far back the text before position + gram equals the end of the context, at least `gram`."""
    match = gram
    while match < size and match - gram < position:
        token = load_token(source[TOKENS], source[WIDTH], position - (match - gram) - 1)
        if token == source[STOP] or token != context[size - 1 - match]:
            break
        match += 1
    return match


@njit(inline="always")
def _sample(source, row, bounds, step, phase, gram, longer, context, size, occurrences, count):
    """Takes every step-th row of one source's interval. Returns the number of occurrences after it.

    Rows whose match reaches `longer` were taken with that longer prefix already."""
    suffixes = view_i32(source[SUFFIXES], source[ROWS])
    for at in range(bounds[0] + phase, bounds[1], step):
        if count == occurrences.shape[1]:
            break
        position = np.int64(suffixes[at])
        following = load_token(source[TOKENS], source[WIDTH], position + gram)
        if following == source[STOP]:
            continue
        match = _match_length(source, position, context, size, gram)
        if match >= longer:
            continue
        occurrences[SOURCE, count] = row
        occurrences[CURSOR, count] = position + gram
        occurrences[MATCH, count] = match
        occurrences[STEP, count] = step
        count += 1
    return count


@njit(inline="always")
def _locate(sources, begin, end, query, size, intervals):
    """The prefix's interval in each source of a tier; returns the rows of all of them."""
    total = np.int64(0)
    for row in range(begin, end):
        first, last = interval(sources[row], query, size)
        intervals[row - begin, 0], intervals[row - begin, 1] = first, last
        total += last - first
    return total


@njit(inline="always")
def _take(sources, begin, end, intervals, total, gram, longer, context, size, occurrences, count):
    """Interval sampling over a tier's intervals, as if they were one. Returns the occurrences after it."""
    step = max(np.int64(1), (total + SAMPLES - 1) // SAMPLES)
    passed = np.int64(0)
    for row in range(begin, end):
        bounds = intervals[row - begin]
        phase = (-passed) % step
        count = _sample(
            sources[row], row, bounds, step, phase, gram, longer, context, size, occurrences, count
        )
        passed += bounds[1] - bounds[0]
    return count


@njit
def segment_occurrences(sources, begin, end, context, size, intervals, occurrences, count):
    """Algorithm 2 for one tier (source rows begin..end): back off to shorter prefixes until there is enough.

    context: int64 [size], the last tokens of the text. intervals: int64 [MAX_SEGMENTS, 2], scratch.
    Beyond the paper: where the first prefix has more occurrences than are sampled, those that match longer are listed
    before, because a sample would miss most of them. Returns the number of occurrences after it."""
    before = count
    longer = MAX_MATCH + 1
    for gram in range(min(FIRST_GRAM, size), 0, -1):
        total = _locate(sources, begin, end, context[size - gram :], gram, intervals)
        if gram == FIRST_GRAM and total > SAMPLES and size >= LONG_GRAM:
            found = _locate(sources, begin, end, context[size - LONG_GRAM :], LONG_GRAM, intervals)
            if found > 0:
                count = _take(
                    sources,
                    begin,
                    end,
                    intervals,
                    found,
                    LONG_GRAM,
                    longer,
                    context,
                    size,
                    occurrences,
                    count,
                )
                longer = LONG_GRAM
            total = _locate(sources, begin, end, context[size - gram :], gram, intervals)
        if total > 0:
            count = _take(
                sources, begin, end, intervals, total, gram, longer, context, size, occurrences, count
            )
            longer = gram
        if count - before >= ENOUGH:
            break
    return count
