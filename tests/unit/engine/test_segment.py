import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore_service.engine.batch import source_table
from datastore_service.engine.packing import pack
from datastore_service.engine.retrieval import FIRST_ROW, LARGE, interval
from datastore_service.engine.segment import BLOCK, Segment, build_segment, token_dtype
from tests.unit.engine.oracles import occurrences

# (vocabulary, ids to draw from): few distinct ids make long repeats, the largest ids make width errors visible.
ALPHABETS = [
    (2, [0, 1]),
    (255, [0, 1, 254]),
    (256, [0, 1, 255]),
    (65_535, [0, 7, 32_768, 65_534]),
    (65_536, [0, 7, 32_768, 65_535]),
    (70_000, [1, 255, 256, 65_536, 69_999]),
    (1 << 31, [0, 1 << 24, (1 << 31) - 1]),
]


@st.composite
def corpora(draw):
    vocab_size, ids = draw(st.sampled_from(ALPHABETS))
    document = st.lists(st.sampled_from(ids), max_size=60)
    return vocab_size, ids, draw(st.lists(document, max_size=8))


def as_arrays(documents):
    return [np.array(document, dtype=np.int64) for document in documents]


def find(segment: Segment, prefix) -> set[int]:
    source = source_table((), (), (segment,))[FIRST_ROW]
    first, last = interval(source, np.array(prefix, dtype=np.int64), len(prefix))
    return set(segment.suffix_array()[first:last].tolist())


def assert_finds(segment: Segment, prefix, expected: set[int]) -> None:
    """Exactly the expected positions; of many, up to a block's at either end of the interval may be missing."""
    found = find(segment, prefix)
    assert found <= expected
    assert len(expected) - len(found) <= (2 * BLOCK if len(expected) > LARGE else 0)


@given(corpora())
def test_documents_come_back_and_the_order_holds(corpus):
    vocab_size, _, documents = corpus
    segment = build_segment(as_arrays(documents), vocab_size)
    segment.check_integrity()
    assert [segment.document(i).tolist() for i in range(segment.documents)] == documents
    assert len(segment) == sum(map(len, documents))


@given(corpora(), st.data())
def test_search_finds_exactly_the_occurrences_within_documents(corpus, data):
    vocab_size, ids, documents = corpus
    segment = build_segment(as_arrays(documents), vocab_size)
    prefix = data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=6))
    expected = {int(segment.offsets[number]) + start for number, start in occurrences(documents, prefix)}
    assert_finds(segment, prefix, expected)


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK])
def test_search_across_blocks_of_the_key_table(size):
    rng = np.random.default_rng(size)
    documents = [rng.integers(0, 3, size) for _ in range(4)]
    segment = build_segment(documents, 3)
    for length in (1, 2, 4, 5, 7):
        for start in range(0, size - length, 7):
            prefix = documents[0][start : start + length].tolist()
            expected = {int(segment.offsets[d]) + at for d, at in occurrences(documents, prefix)}
            assert_finds(segment, prefix, expected)


def test_a_full_two_byte_vocabulary_costs_at_most_six_bytes_a_token():
    rng = np.random.default_rng(0)
    documents = [rng.permutation(1 << 16), rng.integers(0, 1 << 16, 1 << 16)]
    segment = build_segment(documents, 1 << 16)
    segment.check_integrity()
    assert segment.tokens.dtype == np.uint16
    assert np.array_equal(segment.document(0), documents[0])
    assert segment.nbytes <= 6 * len(segment)


def test_widths():
    assert [token_dtype(v).itemsize for v in (1, 255, 256, 65_536, 65_537, 1 << 31)] == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("documents", "vocab_size", "message"),
    [
        ([[0, 5]], 5, r"id 5 is outside \[0, 5\)"),
        ([[-1]], 5, r"id -1 is outside \[0, 5\)"),
        ([[1 << 31]], 1 << 31, "id 2147483648 is outside"),
        ([[[1]]], 5, "2 dimensions"),
        ([[0.5]], 5, "not an integer"),
        ([], 0, "vocab_size: 0"),
        ([], (1 << 31) + 1, "vocab_size: 2147483649"),
    ],
)
def test_refusals_name_the_field(documents, vocab_size, message):
    with pytest.raises(ValueError, match=message):
        build_segment([np.array(document) for document in documents], vocab_size)


@pytest.mark.parametrize("documents", [[], [[]], [[], []], [[3]], [[3], [], [3]]])
def test_empty_and_tiny_texts(documents):
    segment = build_segment(as_arrays(documents), 4)
    segment.check_integrity()
    assert len(find(segment, [3])) == sum(document.count(3) for document in documents)
    assert find(segment, [3, 3]) == set()


def _with(segment, **changes):
    fields = {name: getattr(segment, name) for name in Segment.__slots__}
    return Segment(**fields | changes)


def test_integrity_check_sees_each_damage():
    segment = build_segment([np.arange(200) % 7], 7)
    swapped, doubled = segment.suffix_array(), segment.suffix_array()
    swapped[[3, 90]] = swapped[[90, 3]]
    doubled[3] = doubled[4]
    foreign = segment.tokens.copy()
    foreign[5] = 9
    for message, changes in {
        "out of order": {"suffixes": pack(swapped, segment.suffix_bits)},
        "permutation": {"suffixes": pack(doubled, segment.suffix_bits)},
        "vocabulary": {"tokens": foreign},
        "separator": {"separator": 3},
        "offsets": {"offsets": np.array([0, 100])},
        "keys": {"keys": segment.keys + np.uint64(1)},
    }.items():
        with pytest.raises(ValueError, match=message):
            _with(segment, **changes).check_integrity()
