"""The speculation cache, against a list of texts."""

import itertools

import numpy as np
import pytest

from sglang_patches.drafting.cache import DROPPED, SpeculationCache
from sglang_patches.exchange.messages import Growth
from sglang_patches.exchange.trie import ROOT, Trie

EPOCH = 1


def growth(first, parents, tokens, probabilities=None, epoch=EPOCH, session="s", turn=0):
    probabilities = [0.5] * len(tokens) if probabilities is None else probabilities
    return Growth(
        session,
        epoch,
        turn,
        np.arange(first, first + len(tokens)),
        np.array(parents, np.int64),
        np.array(tokens, np.int32),
        np.array(probabilities, np.float32),
    )


def grow(cache, growth):
    """As the draft side sends it: in its turn."""
    if growth.session in cache:
        growth.turn = cache.trie(growth.session).turn
    return cache.grow(growth)


def tokens(*values):
    return np.array(values, np.int32)


@pytest.fixture
def cache():
    """A session of 10 tokens.  root -> 5 -> 7 -> 9 ; root -> 6 ; 5 -> 8"""
    cache = SpeculationCache()
    cache.open("s", 10)
    grow(cache, growth(1, [ROOT, ROOT, 1, 1, 3], [5, 6, 7, 8, 9], [0.6, 0.3, 0.5, 0.4, 0.9]))
    return cache


def paths(tree):
    found = []
    for node in range(len(tree)):
        path, at = [], node
        while at >= 0:
            path.insert(0, int(tree.tokens[at]))
            at = int(tree.parents[at])
        found.append(path)
    return found


def test_the_likeliest_nodes_come_first(cache):
    tree = cache.subtree("s", 4, 8, 16)
    tree.check_integrity(nodes=4)
    assert paths(tree) == [[5], [6], [5, 7], [5, 7, 9]]
    assert tree.probs.tolist() == pytest.approx([0.6, 0.3, 0.3, 0.27]) and set(tree.sources) == {16}


@pytest.mark.parametrize(("depth", "expected"), [(0, []), (1, [[5], [6]]), (2, [[5], [6], [5, 7], [5, 8]])])
def test_no_node_is_deeper_than_asked_for(cache, depth, expected):
    assert paths(cache.subtree("s", 8, depth, 16)) == expected


def test_what_was_foreseen_becomes_the_root_and_keeps_its_numbers(cache):
    assert cache.advance("s", 10, tokens(5, 7))
    assert cache.trie("s").epoch == EPOCH and len(cache.trie("s")) == 1
    tree, trie = cache.subtree("s", 8, 8, 16), cache.trie("s")
    assert (
        paths(tree) == [[9]] and trie.child(trie.root, 9) == 5 and tree.probs.tolist() == pytest.approx([0.9])
    )
    grow(cache, growth(6, [3], [4]))
    assert sorted(paths(cache.subtree("s", 8, 8, 16))) == [[4], [9]]


def test_what_was_not_foreseen_begins_an_epoch(cache):
    before = _dropped()
    assert not cache.advance("s", 10, tokens(5, 99))
    assert cache.trie("s").epoch == EPOCH + 1 and len(cache.subtree("s", 8, 8, 16)) == 0
    grow(cache, growth(6, [3], [4]))
    grow(cache, growth(1, [ROOT], [4], session="gone"))
    assert len(cache.trie("s")) == 0 and _dropped() == before + 2
    grow(cache, growth(1, [ROOT], [4], epoch=EPOCH + 1))
    assert paths(cache.subtree("s", 8, 8, 16)) == [[4]]


def test_growth_below_what_is_gone_is_dropped_and_counted(cache):
    cache.advance("s", 10, tokens(5))
    before = _dropped()
    grow(cache, growth(6, [2, 4], [1, 2]))  # node 2 was the root's other child
    assert _dropped() == before + 1 and [8, 2] in paths(cache.subtree("s", 8, 8, 16))


def test_replays_and_gaps_are_harmless(cache):
    grow(cache, growth(1, [ROOT, ROOT], [5, 6], [0.6, 0.3]))
    assert len(cache.trie("s")) == 5
    assert cache.advance("s", 10, tokens(5)) and cache.advance("s", 10, tokens(5, 7))
    assert cache.advance("s", 9, tokens(1, 5, 7)) and cache.trie("s").length == 12
    assert not cache.advance("s", 20, tokens(9))
    assert (cache.trie("s").length, cache.trie("s").epoch) == (21, EPOCH + 1)


def test_a_session_that_is_opened_again_begins_an_epoch(cache):
    assert cache.open("s", 4).epoch == EPOCH + 1 and "s" in cache
    cache.close("s")
    cache.close("s")
    assert "s" not in cache


def _dropped():
    return sum(
        sample.value
        for family in DROPPED.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    )


def test_against_lists_of_texts():
    """Random growth and random walks; a trie is the set of its paths."""
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        cache, known, numbers = SpeculationCache(), {(): ROOT}, itertools.count(1)
        cache.open("s", 0)
        epoch, length = EPOCH, 0
        for _ in range(12):
            for _ in range(int(rng.integers(0, 8))):
                parent = list(known)[rng.integers(len(known))]
                path = (*parent, int(rng.integers(3)))
                if path not in known:
                    number = next(numbers)
                    grow(cache, growth(number, [known[parent]], [path[-1]], epoch=epoch))
                    known[path] = number
            emitted = tuple(rng.integers(0, 3, rng.integers(1, 4)).tolist())
            foreseen = emitted in known
            assert cache.advance("s", length, tokens(*emitted)) is foreseen
            length, hits = length + len(emitted), hits + foreseen
            if foreseen:
                known = {
                    path[len(emitted) :]: n for path, n in known.items() if path[: len(emitted)] == emitted
                }
            else:
                known, numbers, epoch = {(): ROOT}, itertools.count(1), epoch + 1
            found = [tuple(path) for path in paths(cache.subtree("s", 100, 100, 16))]
            assert {path: cache.trie("s").follow(list(path))[-1] for path in found} == {
                path: n for path, n in known.items() if path
            }
    assert hits > 100


def test_what_both_sides_number_is_one_node():
    trie = Trie(5)
    grafted = trie.graft(0, 7, 0.5)
    below = trie.graft(grafted, 8, 0.4)
    assert (grafted, below) == (-1, -2)
    assert trie.add(1, 0, 7, 0.6) == grafted and trie.resolve(1) == grafted
    assert trie.add(2, 1, 9, 0.3) == 2 and trie.parent(2) == grafted
    assert trie.path(2) == [grafted, 2] and [trie.token(node) for node in trie.path(below)] == [7, 8]


def test_aliases_end_with_their_nodes():
    trie = Trie(5)
    trie.graft(0, 7, 0.5)
    trie.graft(0, 8, 0.5)
    trie.add(1, 0, 7, 0.6)
    assert trie.advance(trie.follow([8]), 1) and 1 not in trie


def test_a_growth_that_comes_again_changes_nothing(cache):
    again = growth(1, [ROOT], [99])
    assert cache.grow(again) and cache.trie("s").child(ROOT, 99) is None


def test_a_gap_between_growths_is_told(cache):
    assert not cache.grow(growth(9, [ROOT], [99], turn=2))
    assert grow(cache, growth(9, [ROOT], [99])) and cache.trie("s").child(ROOT, 99) == 9
