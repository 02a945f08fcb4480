"""Names that clients choose, as a datastore takes them."""

from hypothesis import given
from hypothesis import strategies as st

from datastore_service.engine.checking import check_entries
from datastore_service.protocol.names import MAX_NAME_BYTES, bounded_name
from datastore_service.protocol.types import Entry, Opening

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=400)  # surrogates too


@given(ANY_TEXT)
def test_every_name_becomes_one_that_an_engine_takes(name):
    bounded = bounded_name(name)
    check_entries([Entry(bounded, opening=Opening(bounded))], 10)
    assert (bounded == name) == fits(name)


def fits(name):
    surrogate = any("\ud800" <= character <= "\udfff" for character in name)
    size = len(name.encode(errors="surrogatepass"))
    return not surrogate and 0 < size <= MAX_NAME_BYTES and not name.startswith("sha256:")


@given(ANY_TEXT, ANY_TEXT)
def test_different_names_stay_different(one, other):
    assert (bounded_name(one) == bounded_name(other)) == (one == other)


def test_nobody_can_choose_another_s_digest():
    digest = bounded_name("x" * 300)
    assert digest != bounded_name(digest)
