"""The equations of DOUBLE, where they hold and where not, against the process that they are about."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pipeline.theory import double, parallel
from benchmarks.pipeline.theory.chain import chain_tokens
from tests.unit.benchmarks.drafting_rounds import (
    accepted,
    parallel_cycles,
    sequential_cycles,
    standard_errors,
)

RATIOS = 1.6, 2.8, 3.9, 4.7, 5.0  # C of the paper's five pairs, table 1
NEARLY_ONE = 1 - 1e-7
PROCESSES = [(0.6, 2, 1.6), (0.9, 4, 3.9), (0.97, 5, 4.7)]  # acceptance, gamma, C
RETRIEVALS = [(1.0,), (0.0, 1.0), (0.5, 0.1, 0.1, 0.3)]  # AMT 0, 1, 1.2

acceptances = st.floats(0.01, 0.99)
lengths = st.integers(1, 10)
ratios = st.floats(1, 10)


# As printed


@pytest.mark.parametrize(
    ("ratio", "sequential", "beside"),
    [(1.6, 1.309, 1.483), (2.8, 1.858, 2.323), (3.9, 2.315, 2.945), (4.7, 2.646, 3.306), (5.0, 2.731, 3.456)],
)
def test_equations_11_and_13_with_the_paper_s_ratios(ratio, sequential, beside):
    """Acceptance .9, gamma = ceil(C) as in section 5.1. The paper prints no values of them."""
    gamma = math.ceil(ratio)
    assert double.sequential_speedup(0.9, gamma, ratio) == pytest.approx(sequential, abs=6e-4)
    assert double.parallel_speedup(0.9, gamma, ratio) == pytest.approx(beside, abs=6e-4)


def test_equations_1_8_9_and_12():
    assert chain_tokens(0.5, 3) == 1.875
    assert double.rounds(0.5, 1) == 2
    assert double.sequential_tokens(0.5, 1) == 2 + 1.5
    assert double.parallel_tokens(0.5, 1) == 1 + 1.5


@pytest.mark.parametrize("ratio", RATIOS)
def test_drafting_beside_the_target_comes_to_the_ceiling_where_all_is_accepted(ratio):
    gamma = math.ceil(ratio)
    for speedup in (double.parallel_speedup, double.parallel_bound, parallel.speedup):
        assert speedup(NEARLY_ONE, gamma, ratio) == pytest.approx(ratio, rel=1e-5)


@given(acceptances, lengths, ratios)
def test_theorem_3_s_last_bound(acceptance, gamma, ratio):
    assert double.parallel_speedup(acceptance, gamma, ratio) <= ratio * (1 + 1e-9)
    assert double.parallel_bound(acceptance, gamma, ratio) <= ratio


# Where the bounds do not hold


@given(acceptances, lengths, ratios)
def test_theorem_3_s_first_bound_needs_a_sequential_speedup_of_one(acceptance, gamma, ratio):
    sequential = double.sequential_speedup(acceptance, gamma, ratio)
    gain = double.parallel_speedup(acceptance, gamma, ratio) - sequential
    assert gain >= -1e-9 if sequential >= 1 else gain <= 1e-9


def test_theorem_3_s_first_bound_fails_for_a_poor_draft():
    assert double.sequential_speedup(0.2, 2, 1.6) == pytest.approx(0.582, abs=5e-4)
    assert double.parallel_speedup(0.2, 2, 1.6) == pytest.approx(0.575, abs=5e-4)


def test_theorem_3_s_middle_bound_fails_at_high_acceptance():
    assert double.parallel_tokens(0.99, 4) == pytest.approx(102.4, abs=0.05)
    assert double.rounds(0.99, 4) * 4 == pytest.approx(101.5, abs=0.05)
    assert double.parallel_speedup(0.99, 4, 4) > double.parallel_bound(0.99, 4, 4)


@given(acceptances, lengths, ratios)
def test_theorem_3_s_middle_bound_holds_for_what_the_process_gives(acceptance, gamma, ratio):
    gamma = max(gamma, math.ceil(ratio))
    assert (
        parallel.speedup(acceptance, gamma, ratio) <= double.parallel_bound(acceptance, gamma, ratio) + 1e-9
    )


# Against the process, without retrieval


def test_theorem_1():
    right = accepted(np.random.default_rng(0), 0.8, np.full(20_000, 4))
    assert abs(standard_errors(right + 1, chain_tokens(0.8, 4))) < 4


@pytest.mark.parametrize(("acceptance", "gamma", "ratio"), PROCESSES)
def test_equation_8(acceptance, gamma, ratio):
    cycles = parallel_cycles(acceptance, gamma, ratio)
    assert abs(standard_errors(cycles.rounds, double.rounds(acceptance, gamma))) < 4


@pytest.mark.parametrize(("acceptance", "gamma", "ratio"), PROCESSES)
def test_equations_9_to_13_hold_if_the_last_round_is_like_any_other(acceptance, gamma, ratio):
    """Equation 10 gives the last round the mean of theorem 1, in which a round may be accepted as a whole."""
    sequential = sequential_cycles(acceptance, gamma, ratio, last="like any other")
    assert abs(standard_errors(sequential.tokens, double.sequential_tokens(acceptance, gamma))) < 4
    assert abs(sequential.errors_from(double.sequential_speedup(acceptance, gamma, ratio))) < 4
    beside = parallel_cycles(acceptance, gamma, ratio, last="like any other")
    assert abs(standard_errors(beside.tokens, double.parallel_tokens(acceptance, gamma))) < 4
    assert abs(beside.errors_from(double.parallel_speedup(acceptance, gamma, ratio))) < 4


@pytest.mark.parametrize(("acceptance", "gamma", "ratio"), PROCESSES)
def test_equations_9_to_13_are_too_high_for_a_last_round_with_a_refusal(acceptance, gamma, ratio):
    sequential, beside = (play(acceptance, gamma, ratio) for play in (sequential_cycles, parallel_cycles))
    assert standard_errors(sequential.tokens, double.sequential_tokens(acceptance, gamma)) < -10
    assert sequential.errors_from(double.sequential_speedup(acceptance, gamma, ratio)) < -10
    assert standard_errors(beside.tokens, double.parallel_tokens(acceptance, gamma)) < -10
    assert beside.errors_from(double.parallel_speedup(acceptance, gamma, ratio)) < -10


@pytest.mark.parametrize(("acceptance", "gamma", "ratio"), PROCESSES)
def test_what_the_process_gives(acceptance, gamma, ratio):
    sequential, beside = (play(acceptance, gamma, ratio) for play in (sequential_cycles, parallel_cycles))
    assert abs(standard_errors(beside.tokens, parallel.tokens(acceptance))) < 4
    assert abs(sequential.errors_from(parallel.sequential_speedup(acceptance, gamma, ratio))) < 4
    assert abs(beside.errors_from(parallel.speedup(acceptance, gamma, ratio))) < 4


@given(acceptances, lengths)
def test_a_cycle_of_the_process_has_rounds_of_theorem_1(acceptance, gamma):
    rounds = double.rounds(acceptance, gamma)
    given = parallel.tokens(acceptance) + rounds - 1
    assert rounds * chain_tokens(acceptance, gamma) == pytest.approx(given)
    assert double.sequential_tokens(acceptance, gamma) >= given * (1 - 1e-9)


@pytest.mark.parametrize(
    ("ratio", "sequential", "beside"),
    [(1.6, 1.204, 1.319), (2.8, 1.660, 2.019), (3.9, 2.022, 2.511), (4.7, 2.270, 2.779), (5.0, 2.343, 2.905)],
)
def test_what_the_process_gives_with_the_paper_s_ratios(ratio, sequential, beside):
    gamma = math.ceil(ratio)
    assert parallel.sequential_speedup(0.9, gamma, ratio) == pytest.approx(sequential, abs=6e-4)
    assert parallel.speedup(0.9, gamma, ratio) == pytest.approx(beside, abs=6e-4)


def test_equation_13_needs_gamma_of_at_least_c():
    """With fewer drafted tokens the draft model waits for the target, and gamma is the ceiling."""
    cycles = parallel_cycles(0.95, gamma=2, ratio=5)
    assert abs(cycles.errors_from(parallel.speedup(0.95, 2, 5))) < 4
    assert double.parallel_speedup(NEARLY_ONE, 2, 5) == pytest.approx(5, rel=1e-5)
    assert parallel.speedup(NEARLY_ONE, 2, 5) == pytest.approx(2, rel=1e-5) == parallel.ceiling(2, 5)


# Against the process, with retrieval


@pytest.mark.parametrize("matched", RETRIEVALS)
@pytest.mark.parametrize(("acceptance", "gamma", "ratio"), PROCESSES)
def test_a_round_of_retrieval_forwards(acceptance, gamma, ratio, matched):
    cycles = parallel_cycles(acceptance, gamma, ratio, matched)
    assert abs(standard_errors(cycles.tokens, parallel.tokens(acceptance))) < 4
    assert abs(standard_errors(cycles.rounds, parallel.rounds(acceptance, gamma, matched))) < 4
    a_round = parallel.tokens_a_round(acceptance, gamma, matched)
    assert abs(standard_errors(cycles.tokens - a_round * cycles.rounds, 0.0)) < 4
    assert abs(cycles.errors_from(parallel.speedup(acceptance, gamma, ratio, matched))) < 4


def test_a_bonus_of_the_target():
    bonus = 0.4, 0.2, 0.4
    cycles = parallel_cycles(0.9, 4, 3.9, (0.0, 1.0), bonus=bonus)
    assert abs(cycles.errors_from(parallel.speedup(0.9, 4, 3.9, (0.0, 1.0), bonus=1.0))) < 4


@pytest.mark.parametrize("ratio", RATIOS)
def test_retrieval_takes_the_process_past_c(ratio):
    matched = RETRIEVALS[-1]
    cycles = parallel_cycles(0.97, math.ceil(ratio), ratio, matched)
    assert cycles.errors_from(ratio) > 10
    assert ratio < cycles.speedup < parallel.ceiling(math.ceil(ratio), ratio, matched)


@pytest.mark.parametrize("matched", RETRIEVALS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_the_ceiling_with_retrieval(ratio, matched):
    gamma, amt = math.ceil(ratio), parallel.matched_tokens(matched)
    most = parallel.ceiling(gamma, ratio, matched)
    assert most == pytest.approx(ratio * (1 + amt))
    assert parallel.speedup(NEARLY_ONE, gamma, ratio, matched) == pytest.approx(most, rel=1e-5)
    assert parallel.tokens_a_round(NEARLY_ONE, gamma, matched) == pytest.approx(gamma * (1 + amt), rel=1e-5)


@given(acceptances, lengths, ratios, st.integers(0, 10))
def test_no_acceptance_exceeds_the_ceiling(acceptance, gamma, ratio, depth):
    matched = np.full(depth + 1, 1 / (depth + 1))
    assert parallel.speedup(acceptance, gamma, ratio, matched) <= parallel.ceiling(gamma, ratio, matched)


@pytest.mark.parametrize("ratio", RATIOS)
def test_below_the_least_acceptance_no_retrieval_by_the_draft_model_exceeds_c(ratio):
    gamma, always = math.ceil(ratio), np.eye(1001)[-1]
    least = parallel.least_acceptance(gamma, ratio)
    assert parallel.speedup(least - 0.01, gamma, ratio, always) < ratio
    assert parallel.speedup(least + 0.01, gamma, ratio, always) > ratio


@given(acceptances, lengths, ratios, st.integers(1, 5))
def test_amt_that_varies_between_forwards_is_worth_less(acceptance, gamma, ratio, amt):
    always, varying = np.eye(2 * amt + 1)[amt], np.eye(2 * amt + 1)[[0, -1]].mean(axis=0)
    assert parallel.matched_tokens(always) == parallel.matched_tokens(varying) == amt
    assert parallel.speedup(acceptance, gamma, ratio, varying) <= parallel.speedup(
        acceptance, gamma, ratio, always
    ) * (1 + 1e-9)


# Equation 7, in its three readings


@pytest.mark.parametrize(("acceptance", "gamma", "ratio"), PROCESSES)
def test_equation_7_counts_retrieved_tokens_twice(acceptance, gamma, ratio):
    """If E[L_d] is what a cycle gives and k gamma its draft forwards: once in E[L_d], and again in C (1 + AMT)."""
    cycles = parallel_cycles(acceptance, gamma, ratio, (0.0, 1.0))
    twice = double.double_speedup(cycles.tokens.mean(), 0, cycles.rounds.mean() * gamma, ratio, 1)
    assert cycles.errors_from(twice) < -10


@pytest.mark.parametrize("ratio", RATIOS)
def test_equation_7_then_exceeds_its_own_ceiling(ratio):
    gamma, always = math.ceil(ratio), (0.0, 1.0)
    drafted = parallel.rounds(NEARLY_ONE, gamma, always) * gamma
    twice = double.double_speedup(parallel.tokens(NEARLY_ONE), 0, drafted, ratio, 1)
    assert twice == pytest.approx(ratio * (1 + 1) ** 2, rel=1e-5)


@given(acceptances, lengths, ratios, st.integers(1, 5))
def test_equation_7_with_tokens_of_drafting_without_retrieval_is_too_high(acceptance, gamma, ratio, amt):
    """If E[L_d] and k are those of gamma drafted tokens a round. At the ceiling it is right."""
    gamma = max(gamma, math.ceil(ratio))
    drafted = double.rounds(acceptance, gamma) * gamma
    scaled = double.double_speedup(parallel.tokens(acceptance), 0, drafted, ratio, amt)
    assert scaled >= parallel.speedup(acceptance, gamma, ratio, np.eye(amt + 1)[amt]) * (1 - 1e-9)


@given(acceptances, lengths, ratios, st.integers(0, 5), st.floats(0, 5))
def test_equation_7_holds_if_all_of_it_counts_tokens(acceptance, gamma, ratio, amt, bonus):
    """E[L_d] = 1 / (1 - alpha), and gamma (1 + AMT) for gamma, in k too: then (1 + AMT) cancels."""
    gamma = max(gamma, math.ceil(ratio))
    length = gamma * (1 + amt)
    drafted = double.rounds(acceptance, length) * length
    expected = parallel.speedup(acceptance, gamma, ratio, np.eye(amt + 1)[amt], bonus)
    assert double.double_speedup(parallel.tokens(acceptance), bonus, drafted, ratio, amt) == pytest.approx(
        expected
    )
