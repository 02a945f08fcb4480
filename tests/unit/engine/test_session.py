from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore_service.engine.retrieval import (
    CURSOR,
    MATCH,
    MAX_MATCH,
    OCCURRENCE_FIELDS,
    session_occurrences,
)
from datastore_service.engine.session import GRAMS, LEVELS, SEPARATOR, SessionIndex
from tests.unit.engine.oracles import match_length, next_counts, occurrences

WALK = 32
texts = st.lists(st.integers(0, 3), min_size=1, max_size=80)


def indexed(text, chunk=3):
    index = SessionIndex()
    for start in range(0, len(text), chunk):
        index.append(np.array(text[start : start + chunk], dtype=np.int32))
    return index


def found(index):
    out = np.zeros((OCCURRENCE_FIELDS, 1000), dtype=np.int64)
    count = 0
    for level in range(LEVELS - 1, -1, -1):
        count = session_occurrences(index.address, level, WALK, out, count)
    return out[:, :count]


@given(texts, st.integers(1, 9))
def test_every_prefix_length_is_counted_without_lag(text, chunk):
    index = indexed(text, chunk)
    for size in GRAMS:
        if size <= len(text):
            counted = Counter(int(index.tokens[end + 1]) for end in index.occurrences(size))
            assert counted == next_counts(text, size)


@given(texts)
def test_occurrences_are_listed_once_under_their_longest_match(text):
    listed = found(indexed(text))
    places = {
        start + 1: match_length(text, start + 1, text, MAX_MATCH)
        for _, start in occurrences([text[:-1]], text[-1:])
    }
    assert dict(zip(listed[CURSOR].tolist(), listed[MATCH].tolist(), strict=True)) == places
    assert listed.shape[1] == len(places)


def test_a_match_does_not_cross_into_another_document():
    index = indexed([1, 2, 3, 4])
    index.begin_document()
    index.append(np.array([3, 4, 9, 3, 4], dtype=np.int32))
    assert index.known == 5
    listed = found(index)
    matches = dict(zip(listed[CURSOR].tolist(), listed[MATCH].tolist(), strict=True))
    assert matches == {
        7: 2
    }  # after "3 4" in the second document; the first document's "3 4" has no next token
    assert SEPARATOR not in index.text()


def test_growth_keeps_everything():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 5, 5000)
    grown, planned = indexed(text.tolist(), 7), SessionIndex()
    planned.reserve(len(text))
    planned.append(text.astype(np.int32))
    assert np.array_equal(grown.tokens, text)
    for size in GRAMS:
        assert np.array_equal(grown.occurrences(size), planned.occurrences(size))


@pytest.mark.parametrize("distinct", [3, 50_000])
def test_at_most_a_hundred_bytes_a_token(distinct):
    rng = np.random.default_rng(1)
    index = SessionIndex()
    for _ in range(300):
        index.append(rng.integers(0, distinct, 50).astype(np.int32))
        if len(index) >= 1000:
            assert index.nbytes <= 100 * len(index)
