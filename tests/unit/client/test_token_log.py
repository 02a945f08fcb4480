import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from datastore_service.client.token_log import TokenLog
from datastore_service.protocol.types import Entry, Opening


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=20))
def test_holds_the_text_whatever_is_repeated(spans):
    """Entries are slices of one text, some overlapping what is known, some beyond it."""
    text = np.arange(6000, dtype=np.int32)
    log, known = TokenLog(), 0
    log.apply(Entry("s", opening=Opening(prompt_length=3)))
    for start, length in spans:
        log.apply(Entry("s", start=start, tokens=text[start : start + length]))
        if start <= known:
            known = max(known, start + length)
    missing = log.missing("s", 0)
    assert missing.opening == Opening(prompt_length=3)
    np.testing.assert_array_equal(missing.tokens, text[:known])


def test_missing_starts_where_the_service_stopped():
    log = TokenLog()
    log.apply(Entry("s", tokens=tokens(1, 2, 3, 4), opening=Opening()))
    missing = log.missing("s", 3)
    assert (missing.start, missing.tokens.tolist(), missing.opening) == (3, [4], None)


def test_what_is_sent_again_does_not_change_later():
    log = TokenLog()
    log.apply(Entry("s", tokens=tokens(1, 2), opening=Opening()))
    sent = log.missing("s", 0)
    log.apply(Entry("s", start=2, tokens=tokens(3)))
    assert sent.tokens.tolist() == [1, 2]


def test_forgets_removed_sessions_and_knows_no_unopened_ones():
    log = TokenLog()
    log.apply(Entry("s", tokens=tokens(1), opening=Opening()))
    log.apply(Entry("s", start=1, tokens=tokens(2), closing=True))
    assert log.missing("s", 0).tokens.tolist() == [1, 2]
    log.remove("s")
    log.apply(Entry("t", tokens=tokens(1)))
    assert len(log) == 0
    assert log.missing("s", 0) is None
    assert log.missing("t", 0) is None
