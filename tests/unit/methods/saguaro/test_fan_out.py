"""Guesses of outcomes: the paper's formula, and what is learned where the truth is known."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.draft_side.draft import Candidates, Draft
from sglang_patches.exchange.messages import GREEDY, Sampling
from sglang_patches.exchange.text import Text
from sglang_patches.exchange.trie import Trie
from sglang_patches.methods.saguaro import RANKS, GeometricFanOut, fan_out, rounded

ACCEPTANCE, EXPONENT = 0.75, 0.6


def chain_ends(acceptance, length):
    return np.append(acceptance ** np.arange(length) * (1 - acceptance), acceptance**length)


def test_theorem_12():
    ends = chain_ends(0.8, 7)
    shares = fan_out(ends, 0.5, 24)
    assert shares.round(2).tolist() == [4.20, 3.62, 3.12, 2.69, 2.32, 2.00, 1.72, 4.34]
    assert ends @ (1 - shares**-0.5) == pytest.approx(0.443, abs=5e-4)
    assert ends @ (1 - np.full(8, 3.0) ** -0.5) == pytest.approx(0.423, abs=5e-4)
    ratio = 0.8 ** (1 / 1.5)
    assert shares[:7] == pytest.approx(shares[0] * ratio ** np.arange(7))  # geometric
    assert shares[7] == pytest.approx(shares[0] * ratio**7 * 0.2 ** (-1 / 1.5))  # capped


@given(st.lists(st.floats(0.001, 0.9), min_size=2, max_size=8), st.floats(0.2, 2), st.floats(2, 60))
def test_no_other_split_of_the_budget_hits_more_often(ends, exponent, budget):
    ends = np.array(ends)
    shares = fan_out(ends, exponent, budget)
    for other in np.random.default_rng(0).dirichlet(np.ones(len(ends)), 20):
        mixed = 0.9 * shares + 0.1 * budget * other
        assert ends @ shares**-exponent <= ends @ mixed**-exponent * (1 + 1e-9)


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(0, 32)), min_size=1, max_size=12))
def test_rounding_spends_the_budget_as_far_as_there_is_room(rows):
    shares, most = np.array([share for share, _ in rows]), np.array([room for _, room in rows])
    whole = rounded(shares, most)
    assert (whole >= 0).all() and (whole <= most).all()
    assert whole.sum() == min(round(float(shares.sum())), most.sum())
    if (np.ceil(shares) <= most).all():
        assert (np.abs(whole - shares) < 1).all()


# A draft with trees of which the target's ranks are known


def make_draft(parents, ranks, length=10):
    """The target verifies a tree: of each node its parent (-1 for the root) and the rank of its token among the parent's
    candidates; rank r of node n has token 100 (n + 2) + r."""
    draft = Draft("s", Text(np.zeros(length, np.int32)), GREEDY, Trie(length))
    candidates = lambda node: Candidates(100 * (node + 1) + np.arange(40, dtype=np.int32), np.full(40, 0.01))  # noqa: E731
    draft.candidates[0] = candidates(0)
    numbers = []
    for at, (parent, rank) in enumerate(zip(parents, ranks, strict=True)):
        above = 0 if parent < 0 else numbers[parent]
        numbers.append(draft.trie.add(at + 1, above, 100 * (above + 1) + rank, 0.5))
        draft.candidates[numbers[-1]] = candidates(numbers[-1])
    draft.verify(numbers)
    return draft


def draw_rank(rng):
    """The first choice with probability a; F others miss with probability F^-r / 2."""
    if rng.random() < ACCEPTANCE:
        return 0
    return max(1, int(np.ceil((0.5 / rng.random()) ** (1 / EXPONENT))))


def outcome(draft, rng):
    """Path and emitted tokens of a verification."""
    path, tokens = [], []
    while True:
        node = path[-1] if path else draft.trie.root
        tokens.append(100 * (node + 1) + min(draw_rank(rng), 99))
        child = draft.verified_children(node).get(tokens[-1])
        if child is None:
            return path, tokens
        path.append(child)


SHAPES = {
    "chain": ([-1, 0, 1, 2], [0, 0, 0, 0]),
    "tree": ([-1, -1, 0, 0, 1, 2], [0, 1, 0, 2, 0, 1]),
    "of another drafter": ([-1, 0, 1], [3, 0, 35]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_rates_are_the_target_s(shape):
    """Also of trees where a drafted token has another rank than the first, and where every path ends early."""
    rng, predictor = np.random.default_rng(1), GeometricFanOut()
    draft = make_draft(*SHAPES[shape])
    for _ in range(6000):
        predictor.learn(draft, *outcome(draft, rng))
    rates = predictor.rates
    assert rates.sum() == pytest.approx(1)
    assert rates[0] == pytest.approx(ACCEPTANCE, abs=0.03)
    for most in (1, 4, 16, RANKS - 1):
        expected = (1 - ACCEPTANCE) * 0.5 * most**-EXPONENT
        assert 1 - rates[: most + 1].sum() == pytest.approx(expected, abs=0.02)
    assert predictor.exponent == pytest.approx(EXPONENT, abs=0.12)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_probabilities_of_guesses_are_how_often_they_come_true(shape):
    rng, predictor = np.random.default_rng(2), GeometricFanOut()
    draft = make_draft(*SHAPES[shape])
    for _ in range(4000):
        predictor.learn(draft, *outcome(draft, rng))
    guesses = predictor.predict(draft, 12).guesses
    seen = Counter()
    for _ in range(20000):
        path, tokens = outcome(draft, rng)
        seen[path[-1] if path else draft.trie.root, tokens[-1]] += 1
    for guess in guesses:
        assert seen[guess.parent, guess.token] / 20000 == pytest.approx(guess.probability, abs=0.02)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [1, 2, 7, 24, 500])
def test_guesses_are_within_the_budget_and_not_what_is_verified(shape, budget):
    draft = make_draft(*SHAPES[shape])
    guesses = GeometricFanOut().predict(draft, budget).guesses
    assert len(guesses) == min(
        budget, len(SHAPES[shape][0]) * (RANKS - 1) + RANKS + (shape == "of another drafter")
    )
    assert len({(guess.parent, guess.token) for guess in guesses}) == len(guesses)
    for guess in guesses:
        assert guess.token not in draft.verified_children(guess.parent)
        assert guess.token in draft.candidates[guess.parent].tokens


def test_more_guesses_where_the_path_is_more_likely_to_end():
    """A chain of first choices ends at its leaf or early; one that begins with a fourth choice ends before it."""

    def counts(ranks):
        guesses = GeometricFanOut().predict(make_draft([-1, 0], ranks), 20).guesses
        return [sum(guess.parent == node for guess in guesses) for node in (0, 1, 2)]

    root, middle, leaf = counts([0, 0])
    assert leaf > root > middle > 0
    root, middle, leaf = counts([3, 0])
    assert root > 13 and middle > 0 and leaf > 0


def test_the_likeliest_choices_are_guessed():
    guesses = GeometricFanOut().predict(make_draft([-1, 0], [0, 1]), 12).guesses
    by_node = {node: [g.token for g in guesses if g.parent == node] for node in (0, 1, 2)}
    assert by_node[0] == list(range(101, 101 + len(by_node[0])))
    assert by_node[1][0] == 200 and 201 not in by_node[1]
    assert by_node[2][0] == 300
    assert all(g.probability > 0 for g in guesses)


def test_what_is_learned_follows_the_text():
    rng, predictor = np.random.default_rng(3), GeometricFanOut()
    draft = make_draft(*SHAPES["chain"])
    for _ in range(3000):
        predictor.learn(draft, *outcome(draft, rng))
    for _ in range(12000):  # now it is always refused
        predictor.learn(draft, [], [999])
    assert predictor.rates[0] < 0.06


def test_nothing_is_learned_without_a_verification():
    predictor, draft = GeometricFanOut(), make_draft(*SHAPES["chain"])
    before = predictor.rates
    draft.verifying = None
    predictor.learn(draft, [1], [100, 200])
    assert (predictor.rates == before).all()


def test_no_guess_ends_the_request():
    """There is no next step. The other guesses of that end of the path are less likely to be needed."""
    draft, predictor = make_draft([-1, 0], [0, 1]), GeometricFanOut()
    before = predictor.predict(draft, 12).guesses
    end = next(guess.token for guess in before if guess.parent == 2)
    draft.sampling = Sampling(1.0, 1, 1.0, 0.0, None, frozenset([end]))
    after = predictor.predict(draft, 12).guesses
    assert len(after) == len(before) == 12 and end not in [guess.token for guess in after]
    at_leaf = [sum(guess.parent == 2 for guess in guesses) for guesses in (before, after)]
    assert at_leaf[1] < at_leaf[0]


def test_a_draft_of_a_last_token_is_learned_from():
    draft, predictor = make_draft([-1, 0], [0, 2]), GeometricFanOut()
    draft.sampling = Sampling(1.0, 1, 1.0, 0.0, None, frozenset([202]))
    draft.verify([1, 2])
    assert draft.ends == [0, 1]
    before = predictor._counts.copy()
    predictor.learn(draft, [1, 2], [100, 202, 300])
    grown = predictor._counts - before
    assert np.flatnonzero(grown > 0.9).tolist() == [0, 2] and grown.sum() == pytest.approx(2, abs=0.02)
