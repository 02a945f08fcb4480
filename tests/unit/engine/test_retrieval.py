import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore_service.engine.batch import source_table
from datastore_service.engine.retrieval import (
    CURSOR,
    FIRST_PREFIX,
    FIRST_ROW,
    MATCH,
    MAX_MATCH,
    MAX_SEGMENTS,
    OCCURRENCE_FIELDS,
    PREFIXES,
    SAMPLES,
    SOURCE,
    STEP,
    longest_prefix,
    segment_occurrences,
)
from datastore_service.engine.segment import build_segment
from tests.unit.engine.oracles import match_length, occurrences

ENOUGH = 24
contexts = st.lists(st.integers(0, 3), min_size=1, max_size=MAX_MATCH)


def retrieve(segments, context, enough=ENOUGH):
    """Rows (source, position of the next token, match length, step), backing off until there are enough."""
    out = np.zeros((OCCURRENCE_FIELDS, 4000), dtype=np.int64)
    intervals = np.zeros((len(PREFIXES), MAX_SEGMENTS, 2), dtype=np.int64)
    table = source_table((), (), tuple(segments))
    tokens = np.array(context, dtype=np.int64)
    count, end = 0, len(table)
    longest = longest_prefix(table, FIRST_ROW, end, FIRST_PREFIX, SAMPLES, tokens, len(tokens), intervals)
    for place in range(max(FIRST_PREFIX, longest), -1, -1):
        if PREFIXES[place] > len(tokens):
            continue
        count = segment_occurrences(
            table, FIRST_ROW, end, place, longest, SAMPLES, tokens, len(tokens), intervals, out, count
        )
        if count >= enough:
            break
    return out[[SOURCE, CURSOR, MATCH, STEP], :count].T.tolist()


def expected_places(documents, segment, context, gram):
    """{position of the next token: match length} for a prefix length, as the oracle sees it."""
    places = {}
    for number, start in occurrences(documents, context[-gram:]):
        end = start + gram
        if end < len(documents[number]):
            longest = match_length(documents[number], end, context, MAX_MATCH)
            places[int(segment.offsets[number]) + end] = longest
    return places


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=SAMPLES // 2), max_size=2),
    contexts,
    st.integers(1, SAMPLES),
)
def test_unsampled_retrieval_is_the_back_off_of_algorithm_2(documents, context, enough):
    """The documents have no more tokens than are looked at."""
    segment = build_segment([np.array(document, dtype=np.int64) for document in documents], 4)
    places = {}
    for gram in range(min(PREFIXES[FIRST_PREFIX], len(context)), 0, -1):
        places = expected_places(documents, segment, context, gram)
        if len(places) >= enough:
            break
    found = retrieve([segment], context, enough)
    assert {cursor: match for _, cursor, match, _ in found} == places
    assert len(found) == len(places)
    assert all(step == 1 for *_, step in found)


@given(st.lists(st.lists(st.integers(0, 1), max_size=300), min_size=1, max_size=5), contexts)
def test_sampled_occurrences_are_real_and_distinct(documents, context):
    segments = [build_segment([np.array(d, dtype=np.int64)], 4) for d in documents]
    found = retrieve(segments, context)
    assert len({(row, cursor) for row, cursor, *_ in found}) == len(found)
    assert len(found) <= len(PREFIXES) * SAMPLES
    for row, cursor, match, step in found:
        document = documents[row - FIRST_ROW]
        assert cursor < len(document)
        assert match == match_length(document, cursor, context, MAX_MATCH)
        assert step >= 1


def test_interval_sampling_approximates_the_distribution():
    rng = np.random.default_rng(3)
    following = rng.choice([2, 3, 4], size=30_000, p=[0.6, 0.3, 0.1])
    text = np.stack([np.zeros_like(following), np.ones_like(following), following], axis=1)
    segment = build_segment(list(text), 5)
    found = retrieve([segment], [0, 1])
    assert len(found) == SAMPLES
    weight = np.zeros(5)
    for _, cursor, _, step in found:
        weight[segment.tokens[cursor]] += step
    assert np.allclose(weight / weight.sum(), [0, 0, 0.6, 0.3, 0.1], atol=2 / SAMPLES)
    assert abs(weight.sum() / 30_000 - 1) < 0.02


def test_a_rare_long_match_is_found_among_many_short_ones():
    common = [9, 1, 2, 3, 4, 5]
    special = [6, 7, 8, 1, 2, 3, 4, 5]
    documents = [np.array([*common, 0])] * 5000 + [np.array([*special[3:], 0])] + [np.array([*special, 11])]
    segment = build_segment(documents, 12)
    found = retrieve([segment], special)
    assert max(match for _, _, match, _ in found) == len(special)


@pytest.mark.parametrize("match", PREFIXES[FIRST_PREFIX:])
def test_a_match_of_any_length_is_found_among_many_that_are_one_prefix_shorter(match):
    """The rarer, the longer; every shorter prefix has more occurrences than are sampled."""
    context = np.arange(MAX_MATCH) % 97
    lengths = [length for length in PREFIXES[FIRST_PREFIX:] if length < match]
    documents = [[*context[-length:], 98] for length in lengths for _ in range(4 * SAMPLES)]
    segment = build_segment([np.array(d) for d in [*documents, [99, *context[-match:], 100]]], 101)
    found = retrieve([segment], context.tolist(), enough=1000)
    longest = [cursor for _, cursor, length, _ in found if length == match]
    assert [int(segment.tokens[cursor]) for cursor in longest] == [100]
    assert len(found) <= len(PREFIXES) * SAMPLES


def test_several_segments_are_sampled_like_one():
    rng = np.random.default_rng(4)
    parts = [rng.integers(0, 2, 5000) for _ in range(3)]
    found = retrieve([build_segment([part], 2) for part in parts], [0])
    rows = np.bincount([row for row, *_ in found], minlength=5)[FIRST_ROW:]
    assert rows.min() > 0 and rows.max() - rows.min() <= 2
