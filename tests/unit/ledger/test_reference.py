"""Where an output stands in the text that its request brought along, and what that text proposes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.ledger.reference import LONGEST, SEPARATOR, Reference
from sglang_patches.ledger.usage import REFERENCE

TEXT = list(range(100, 200))


def reference_of(*texts: list[int]) -> Reference:
    tokens = [token for text in texts for token in (*text, SEPARATOR)]
    return Reference(np.array(tokens or [SEPARATOR], np.int32))


def read(reference: Reference, output: list[int]) -> Reference:
    reference.follow(np.array(output, np.int32))
    return reference


def proposed(reference: Reference, nodes: int = 4) -> list[int]:
    tree = reference.tree(nodes)
    tree.check_integrity(nodes=nodes, children=1)
    assert set(tree.sources.tolist()) <= {REFERENCE}
    return tree.tokens.tolist()


def test_it_is_proposed_from_its_beginning():
    assert proposed(reference_of(TEXT)) == TEXT[:4]


def test_it_is_followed():
    assert proposed(read(reference_of(TEXT), TEXT[:10])) == TEXT[10:14]


@pytest.mark.parametrize(
    "output",
    [
        [*TEXT[:20], 1, TEXT[21]],  # another token
        [*TEXT[:20], 1, 2, 3, TEXT[21]],  # several for one
        [*TEXT[:20], TEXT[21]],  # one left out
        [*TEXT[:20], 1, 2, 3, *TEXT[20:22]],  # some put in
        [1, 2, 3, *TEXT[20:22]],  # words before it
    ],
    ids=["replaced", "replaced by more", "left out", "put in", "preceded"],
)
def test_it_is_joined_again_after_an_edit(output):
    assert proposed(read(reference_of(TEXT), output)) == TEXT[22:26]


def test_an_edit_breaks_it():
    assert proposed(read(reference_of(TEXT), [*TEXT[:20], 1])) == []


def test_short_agreement_counts_near_the_cursor_alone():
    text = [*TEXT, *range(300, 600), 7, 8, *range(600, 620)]
    assert proposed(read(reference_of(text), [*TEXT[:20], 1, 7, 8])) == []
    assert proposed(read(reference_of(text), [*TEXT[:20], 1, *text[399:402]])) == text[402:406]
    assert proposed(read(reference_of(text), [*text[:380], 1, 8])) == text[402:406]


def test_of_several_places_that_agree_as_long_the_nearest_is_taken():
    text = [1, 2, 3, 50, *TEXT, 1, 2, 3, 51, *range(300, 310), 1, 2, 3, 52]
    assert proposed(read(reference_of(text), [*TEXT[-20:], 1, 2, 3]), 1) == [51]


def test_longer_agreement_goes_before_nearness():
    text = [*TEXT[:50], 3, 90, *range(300, 310), 1, 2, 3, 91]
    assert proposed(read(reference_of(text), [*TEXT[:50], 0, 1, 2, 3]), 1) == [91]


def test_a_proposal_ends_with_its_text():
    several = reference_of(TEXT[:10], TEXT[50:])
    assert proposed(read(several, TEXT[:8])) == TEXT[8:10]
    assert proposed(read(several, TEXT[:10])) == []
    assert proposed(read(several, [*TEXT[:10], *TEXT[60:63]])) == TEXT[63:67]


def test_without_text_nothing_is_proposed():
    assert proposed(reference_of()) == [] == proposed(read(reference_of(), [1, 2, 3]))


def test_chances_are_learned_from_the_output():
    """Where agreement of some tokens has misled, less is expected of it."""
    text = [token for at in range(60) for token in (1, 2, 3, 10 + at)]
    misled, right = reference_of(text), reference_of(text)
    read(misled, [token for at in range(40) for token in (1, 2, 3, 500 + at)] + [1, 2, 3])
    read(right, text[:163])
    first = reference_of(text).tree(1).probs[0]
    assert misled.tree(1).probs[0] < first / 3 < first < right.tree(1).probs[0]


def test_what_has_always_misled_is_proposed_no_more():
    text = [token for at in range(60) for token in (1, 2, 3, 10 + at)]
    output = [token for at in range(600) for token in (1, 2, 3, 500 + at)]
    assert proposed(read(reference_of(text), [1, 2, 3]))
    assert proposed(read(reference_of(text), [*output, 1, 2, 3])) == []


TOKENS = st.lists(st.integers(0, 3), max_size=60)


@given(TOKENS, TOKENS, TOKENS, st.integers(1, 20))
def test_how_an_output_is_cut_into_steps_makes_no_difference(first, second, output, step):
    whole, steps = reference_of(first, second), reference_of(first, second)
    for end in range(step, len(output), step):
        read(steps, output[:end])
    assert proposed(read(steps, output)) == proposed(read(whole, output))


@given(TOKENS, TOKENS, TOKENS)
def test_what_is_taken_back_leaves_no_trace(text, dropped, output):
    anew = read(reference_of(text), dropped)
    anew.begin_anew()
    fresh = read(reference_of(text), output).tree(20)
    again = read(anew, output).tree(20)
    assert again.tokens.tolist() == fresh.tokens.tolist() and again.probs.tolist() == fresh.probs.tolist()


@given(st.lists(TOKENS, max_size=3), TOKENS)
def test_what_is_proposed_stands_in_a_text_behind_what_was_said(texts, output):
    """After an output of at least one token, what is proposed continues a text behind the output's last token."""
    found = proposed(read(reference_of(*texts), output), LONGEST)
    behind = [[*output[-1:], *found]]
    assert not found or any(
        text[at : at + len(of)] == of for of in behind for text in texts for at in range(len(text))
    )


def joined(text: list[int], cursor: int, output: list[int]) -> list[int]:
    """What is proposed where the output left the text before `cursor`: every place is compared, as the module's first lines say it."""
    best, place = 2, None
    for at in range(1, len(text)):
        size = 0
        while size < min(LONGEST, at, len(output)) and text[at - 1 - size] == output[-1 - size]:
            size += 1
        size += 2 if size and cursor - 16 <= at <= cursor + 128 else 0
        if size > best or (place is not None and size == best and abs(at - cursor) < abs(place - cursor)):
            best, place = size, at
    return [] if place is None else text[place : place + 1]


@given(st.lists(st.integers(0, 3), min_size=8, max_size=80), st.data())
def test_the_place_that_agrees_best_is_found(text, data):
    kept = data.draw(st.integers(1, 7))
    output = [*text[:kept], *data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=1))]
    expected = joined(text, kept, output)
    if output[-1] != text[kept]:
        assert proposed(read(reference_of(text), output), 1) == expected


def test_of_a_frequent_token_the_places_near_the_cursor_are_compared():
    """However often it occurs, a step does not wait for all of them."""
    text = [1, 2, 3, 9, *[7] * 5000, *TEXT, 7, 50, *[7] * 5000, 1, 2, 7, 60]
    there = [*text[4990:5104]]
    assert proposed(read(reference_of(text), [*there, 0, 7]), 1) == [50]
    assert proposed(read(reference_of(text), [*there, 0, 1, 2, 7]), 1) != [60]
