"""Finds where the current context occurred before: in the session (SSSD, Algorithm 1), in fresh text and in segments
(Algorithm 2).

Every search lists *occurrences*: places in a text whose preceding tokens equal the end of the context. An occurrence has
its source, the position of the token after it, and its *match length*: how many tokens before the place equal the end of
the context, at most `MAX_MATCH`. Each place is listed once, with its longest match. No continuation is copied.

A source is a row of an int64 table, whose fields are below. Row 0 is the session, row 1 the tokens refused in it. The
live tier's fresh texts follow, newest first, then the segments, grouped by tier.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from datastore_service.engine.memory import load_token, prefetch, read_i64, view_i32, view_i64, view_u64
from datastore_service.engine.packing import packed_value
from datastore_service.engine.segment import BLOCK, key_tokens
from datastore_service.engine.session import (
    DESCRIPTOR_FIELDS,
    GRAMS,
    LENGTH,
    LEVELS,
    REFUSALS,
    REFUSED,
    SEPARATOR,
    find_gram,
    first_slot,
    mix,
    text_of,
)

MAX_MATCH = 128

# Fields of a source: the segment's descriptor, the tier, the address of the index's descriptor (for fresh text alone), the
# vocabulary's size, below which a token is unless the segment's file is damaged, and the owner (for fresh text, and in the session's row
# the session's own address): a session does not look into what it has written itself.
TOKENS, WIDTH, STOP, SUFFIXES, BITS, ROWS, KEYS, KEY_BITS, TIER, INDEX, VOCAB, OWNER = range(12)
SOURCE_FIELDS = 12
INDEX_STOP = (1 << 32) - 1  # SEPARATOR read as unsigned

# Fields of an occurrence: source row, position of the next token, match length, interval rows per sampled row.
SOURCE, CURSOR, MATCH, STEP = range(4)
OCCURRENCE_FIELDS = 4

SESSION_ROW, REJECTED_ROW, FIRST_ROW = range(
    3
)  # of a source table; from FIRST_ROW on rows are the same for every session

FRESH_WALK = 8  # occurrences visited for each n-gram length, in all fresh texts together
SAMPLES = 12  # rows taken of a prefix in all segments of a tier; the paper takes 100, which was slower and no better
LARGE = 8 * BLOCK  # rows of an interval from which its exact ends do not matter
PREFIXES = (*GRAMS, 16, 32, 64, MAX_MATCH)  # lengths of the prefixes that are searched in segments
FIRST_PREFIX = PREFIXES.index(4)  # the first that is searched: the paper's P
MAX_SEGMENTS = 64  # of one tier; the paper caps them at 8
MAX_OCCURRENCES = (
    LEVELS * (3 * SAMPLES + FRESH_WALK) + 2 * len(PREFIXES) * SAMPLES
)  # two refused tokens of each place


@njit(inline="always")
def _longer(level):
    """Matches of at least this many tokens are listed with a longer n-gram."""
    return GRAMS[level + 1] if level + 1 < LEVELS else MAX_MATCH + 1


@njit
def session_occurrences(address, level, walk, occurrences, count):
    """Lists earlier occurrences of the session's last n-gram of GRAMS[level] tokens, newest first. Visits at most `walk`.
    Returns the new number of occurrences."""
    descriptor = view_i64(address, DESCRIPTOR_FIELDS)
    tokens, links = text_of(descriptor)
    last = descriptor[LENGTH] - 1
    end = np.int64(links[level, last])
    for _ in range(walk):
        if end < 0:
            break
        match = GRAMS[level]
        while match < MAX_MATCH and match <= end and tokens[end - match] == tokens[last - match]:
            if tokens[end - match] == SEPARATOR:
                break
            match += 1
        if match < _longer(level) and tokens[end + 1] != SEPARATOR:
            occurrences[SOURCE, count] = SESSION_ROW
            occurrences[CURSOR, count] = end + 1
            occurrences[MATCH, count] = match
            occurrences[STEP, count] = 1
            count += 1
        end = np.int64(links[level, end])
    return count


@njit
def refused_occurrences(address, occurrences, begin, end):
    """Lists what the target refused after the session's occurrences [begin, end), which are the last in the list. The
    cursor of such an occurrence is an index into the list of refusals. Returns the new number of occurrences."""
    descriptor = view_i64(address, DESCRIPTOR_FIELDS)
    refusals, count = descriptor[REFUSALS], end
    if refusals == 0:
        return count
    refused = view_i32(descriptor[REFUSED], 2 * refusals)
    for at in range(begin, end):
        cursor = occurrences[CURSOR, at]
        place, high = np.int64(0), refusals
        while place < high:
            middle = (place + high) >> 1
            if refused[2 * middle] < cursor:
                place = middle + 1
            else:
                high = middle
        while place < refusals and refused[2 * place] == cursor:
            occurrences[SOURCE, count] = REJECTED_ROW
            occurrences[CURSOR, count] = place
            occurrences[MATCH, count] = occurrences[MATCH, at]
            occurrences[STEP, count] = 1
            count += 1
            place += 1
    return count


@njit
def fresh_occurrences(sources, begin, end, level, context, size, occurrences, count):
    """Lists where the context's last n-gram of GRAMS[level] tokens ends in fresh texts (source rows begin..end), newest
    first. Another thread may be appending; an unfinished document is not seen. Returns the new number of occurrences."""
    hashed = np.uint64(0)
    for back in range(GRAMS[level]):
        hashed = mix(hashed, context[size - 1 - back])
    walked = 0
    for row in range(begin, end):
        if sources[row, OWNER] == sources[SESSION_ROW, OWNER]:
            continue
        walked, count = _walk_fresh(
            sources[row], row, level, hashed, _longer(level), context, size, walked, occurrences, count
        )
    return count


@njit(inline="always")
def _walk_fresh(source, row, level, hashed, longer, context, size, walked, occurrences, count):
    """Does one fresh text's part of a level. Matches of at least `longer` tokens are listed already."""
    length = read_i64(source[INDEX], LENGTH)  # complete documents up to here
    descriptor = view_i64(source[INDEX], DESCRIPTOR_FIELDS)
    tokens, links = text_of(descriptor)
    _, at = find_gram(descriptor, tokens, first_slot(descriptor, hashed), level, context, size - 1)
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
def _keys_below(keys, key, low, high):
    """Index of the first of keys [low, high) that is not below `key`, by binary search."""
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


@njit(inline="always")
def _keys_upto(keys, key, low):
    """The number of keys that are at most `key`. The first `low` are; usually there are few more."""
    high, step = low, 1
    while high < len(keys) and keys[high] <= key:
        low = high + 1
        high += step
        step *= 2
    high = min(high, len(keys))
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] <= key:
            low = middle + 1
        else:
            high = middle
    return low


@njit(inline="always")
def _suffix(source, row):
    """Start of a row's suffix. It is within the text even if the file is damaged."""
    return min(packed_value(source[SUFFIXES], source[BITS], row), source[ROWS] - 1)


@njit(inline="always")
def _suffix_order(source, position, query, size):
    """Negative, zero or positive if the suffix is below, begins with, or is above the query.

    It needs no bounds check: text ends with a separator, which no query contains."""
    order = np.int64(0)
    for i in range(size):
        order = load_token(source[TOKENS], source[WIDTH], position + i) - query[i]
        if order != 0:
            break
    return order


@njit(inline="always")
def _narrow(source, query, size, low, high, or_equal):
    """Narrows suffix array rows [low, high) by binary search to at most BLOCK rows. The first row that is not below the
    query (or_equal: that is above it) is among them, or is the row after them."""
    while high - low > BLOCK:
        middle = (low + high) >> 1
        order = _suffix_order(source, _suffix(source, middle), query, size)
        if order < 0 or (or_equal and order == 0):
            low = middle + 1
        else:
            high = middle
    return low, high


@njit(inline="always")
def _scan(source, query, size, low, high):
    """The first row of [low, high) that is not below the query, and the first that is above it. The suffixes are in random
    places of the text, so all are prefetched before the first is read."""
    for row in range(low, high):
        prefetch(source[TOKENS] + _suffix(source, row) * source[WIDTH])
    first, last = low, low
    for row in range(low, high):
        order = _suffix_order(source, _suffix(source, row), query, size)
        first += order < 0
        last += order <= 0
    return first, last


@njit
def interval(source, query, size):
    """The suffix array rows [first, end) of the suffixes that begin with query[:size]; size >= 1. Of more than LARGE rows
    up to BLOCK are missing at either end, which does not matter because they are sampled.

    source: int64 [SOURCE_FIELDS]. query: int64."""
    rows, key_bits = source[ROWS], source[KEY_BITS]
    for i in range(size):
        if query[i] == source[STOP] or query[i] >> key_bits != 0:
            return np.int64(0), np.int64(0)
    held = min(size, key_tokens(key_bits))
    key = np.uint64(0)
    for i in range(held):
        key = (key << np.uint64(key_bits)) | np.uint64(query[i])
    rest = np.uint64((key_tokens(key_bits) - held) * key_bits)
    least = key << rest
    most = least | ((np.uint64(1) << rest) - np.uint64(1))
    keys = view_u64(source[KEYS], (rows + BLOCK - 1) // BLOCK)
    below = _keys_below(keys, least, 0, len(keys))
    upto = _keys_upto(keys, most, below)
    start, end = max(np.int64(0), (below - 1) * BLOCK), min(rows, upto * BLOCK)
    if size > held:
        return _refined(source, query, size, start, end)
    if (upto - below) * BLOCK > LARGE:
        return below * BLOCK, (upto - 1) * BLOCK + 1
    if upto == below:
        return _scan(source, query, size, start, end)
    first, _ = _scan(source, query, size, start, min(rows, below * BLOCK))
    _, last = _scan(source, query, size, (upto - 1) * BLOCK, end)
    return first, last


@njit(inline="always")
def _refined(source, query, size, start, end):
    """The rows of [start, end) that begin with all of the query. The keys of the range agree with it."""
    low, high = _narrow(source, query, size, start, end, False)
    first, last = _scan(source, query, size, low, high)
    if last < high or high == end:
        return first, last
    low, high = _narrow(source, query, size, last, end, True)
    _, last = _scan(source, query, size, low, high)
    return first, last


@njit(inline="always")
def _match_length(source, position, context, size, gram):
    """Number of tokens before position + gram that equal the end of the context; at least `gram`."""
    match = gram
    while match < size and match - gram < position:
        token = load_token(source[TOKENS], source[WIDTH], position - (match - gram) - 1)
        if token == source[STOP] or token != context[size - 1 - match]:
            break
        match += 1
    return match


@njit(inline="always")
def _sample(source, row, bounds, step, phase, gram, longer, context, size, occurrences, count):
    """Lists every step-th row of one source's interval. Returns the new number of occurrences.

    Rows that match at least `longer` tokens are listed already, with the longer prefix."""
    end = count
    for at in range(bounds[0] + phase, bounds[1], step):
        if end == occurrences.shape[1]:
            break
        cursor = _suffix(source, at) + gram
        prefetch(source[TOKENS] + cursor * source[WIDTH])
        occurrences[CURSOR, end] = cursor
        end += 1
    for at in range(count, end):
        cursor = occurrences[CURSOR, at]
        if load_token(source[TOKENS], source[WIDTH], cursor) == source[STOP]:
            continue
        match = _match_length(source, cursor - gram, context, size, gram)
        if match >= longer:
            continue
        occurrences[SOURCE, count] = row
        occurrences[CURSOR, count] = cursor
        occurrences[MATCH, count] = match
        occurrences[STEP, count] = step
        count += 1
    return count


@njit(inline="always")
def _locate(sources, begin, end, query, size, intervals):
    """Finds the prefix's interval in each source of a tier; returns the number of rows in all of them."""
    total = np.int64(0)
    for row in range(begin, end):
        first, last = interval(sources[row], query, size)
        intervals[row - begin, 0], intervals[row - begin, 1] = first, last
        total += last - first
    return total


@njit(inline="always")
def _take(sources, begin, end, intervals, samples, gram, longer, context, size, occurrences, count):
    """Samples a tier's intervals as if they were one. Returns the new number of occurrences."""
    total = np.int64(0)
    for row in range(end - begin):
        total += intervals[row, 1] - intervals[row, 0]
    step = max(np.int64(1), (total + samples - 1) // samples)
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
def longest_prefix(sources, begin, end, shortest, samples, context, size, intervals):
    """Locates prefixes in one tier (source rows begin..end): the shortest and then ever longer ones, as long as the one before
    has more occurrences than are sampled. A sample would miss most of those with a longer match.

    shortest: its place in PREFIXES. Other arguments: see segment_occurrences. Returns the place in PREFIXES of the longest that occurs, or -1."""
    longest = np.int64(-1)
    for place in range(shortest, len(PREFIXES)):
        gram = PREFIXES[place]
        if gram > size:
            break
        total = _locate(sources, begin, end, context[size - gram :], gram, intervals[place])
        if total > 0:
            longest = np.int64(place)
        if total <= samples:
            break
    return longest


@njit
def segment_occurrences(
    sources, begin, end, place, longest, samples, context, size, intervals, occurrences, count
):
    """Lists where a prefix occurs in one tier (source rows begin..end) and a longer one does not. It is one turn of Algorithm
    2, which backs off to shorter prefixes.

    place: of the prefix in PREFIXES. longest: of `longest_prefix`. context: int64 [size], the last tokens of the text.
    intervals: int64 [PREFIXES, MAX_SEGMENTS, 2], as `longest_prefix` left them. Returns the new number of occurrences."""
    gram = PREFIXES[place]
    if place < FIRST_PREFIX:
        _locate(sources, begin, end, context[size - gram :], gram, intervals[place])
    elif place > longest:
        return count
    longer = MAX_MATCH + 1 if place == longest else PREFIXES[place + 1]
    return _take(
        sources, begin, end, intervals[place], samples, gram, longer, context, size, occurrences, count
    )
