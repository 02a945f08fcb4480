"""The formulas of Speculative Speculative Decoding against its examples."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.pipeline import theory
from benchmarks.pipeline.theory import chain_tokens

rates = st.floats(0.01, 0.99)


def test_equation_1_is_where_the_recurrence_ends():
    assert theory.hit_rate(0.9, 0.7) == pytest.approx(0.875)
    rate = 0.5
    for _ in range(200):
        rate = rate * 0.6 + (1 - rate) * 0.3
    assert theory.hit_rate(0.6, 0.3) == pytest.approx(rate)


@given(rates, st.floats(1, 8), st.floats(0.01, 0.99))
def test_corollary_8_same_speculator_for_both(p_hit, tokens, t_draft):
    beside = theory.speedup(p_hit, tokens, tokens, t_draft, t_draft)
    assert beside > theory.synchronous(tokens, t_draft)
    assert theory.speedup(0.0, tokens, tokens, t_draft, t_draft) == pytest.approx(
        theory.synchronous(tokens, t_draft)
    )


@given(rates, st.floats(2, 8), st.floats(0, 1), st.floats(2, 8), st.floats(0, 2))
def test_corollary_9_bounds_theorem_7(p_hit, e_hit, share, e_sync, t_sync):
    e_miss = 1 + share * (e_hit - 1)
    least, most = theory.sandwich(p_hit, e_hit, e_sync, t_sync)
    gain = theory.speedup(p_hit, e_hit, e_miss, 0.9, 0.0) / theory.synchronous(e_sync, t_sync)
    assert least - 1e-9 <= gain <= most + 1e-9


def test_corollary_16():
    one = theory.speedup(0.9, 4, 1, 0.6, 0.6)
    assert theory.speedup(0.9, 4, 1, 0.6, 0.6, batch=1) == one == pytest.approx(3.7 / (0.9 + 0.1 * 1.6))
    assert theory.speedup(0.9, 4, 1, 0.6, 0.6, batch=500) == pytest.approx(3.7 / 1.6)


@pytest.mark.parametrize(("p_hit", "batch"), [(0.95, 1.31), (0.9, 1.38), (0.8, 1.56)])
def test_theorem_17(p_hit, batch):
    assert theory.critical_batch(p_hit, 4, 1, 0.6) == pytest.approx(batch, abs=0.005)


@given(rates, st.floats(1.1, 8), st.floats(0, 0.99), st.floats(0.05, 1))
def test_theorem_17_is_where_the_two_rules_are_equal(p_hit, e_hit, share, t_primary):
    e_miss = 1 + share * (e_hit - 1)
    b = theory.critical_batch(p_hit, e_hit, e_miss, t_primary)
    assume(0 < b < 1e3)
    waiting = theory.speedup(p_hit, e_hit, e_hit, t_primary, t_primary, b)
    assert waiting == pytest.approx(theory.speedup(p_hit, e_hit, e_miss, t_primary, 0.0, b), rel=1e-6)


@pytest.mark.parametrize(("t_primary", "e_miss"), [(0.6, 1.74), (0.3, 2.83), (0.9, 0.70)])
def test_what_a_fallback_without_latency_has_to_give(t_primary, e_miss):
    """At hit rate .9 and batch 1, E_hit 4."""
    assert theory.critical_batch(0.9, 4, e_miss - 0.01, t_primary) > 1
    assert theory.critical_batch(0.9, 4, e_miss + 0.01, t_primary) < 1


def test_waiting_that_costs_less_than_any_miss_is_always_better():
    assert math.isinf(theory.critical_batch(0.5, 8, 1, 0.1))
    assert theory.critical_batch(0.9, 4, 4, 0.6) == 0


def test_theorem_19():
    target, drafted = np.array([0.48, 0.48, 0.02, 0.02]), np.array([0.49, 0.49, 0.01, 0.01])
    scaled = theory.saguaro_sampling(drafted, 2, 47 / 147)
    assert scaled == pytest.approx([0.47, 0.47, 0.03, 0.03])
    assert theory.acceptance_rate(target, drafted) == pytest.approx(0.98)
    assert theory.acceptance_rate(target, scaled) == pytest.approx(0.98)
    assert theory.hits_after_refusal(target, drafted, drafted, 2) == pytest.approx(0.5)
    assert theory.hits_after_refusal(target, scaled, drafted, 2) == pytest.approx(1)


@given(st.integers(0, 10**6), st.integers(1, 5))
def test_theorem_15_a_smaller_weight_never_hits_less(seed, fan_out):
    rng = np.random.default_rng(seed)
    target, drafted = rng.dirichlet(np.ones(8), 2)
    cached = np.argsort(-drafted)[:fan_out]

    def hits(weight):
        residual = np.maximum(target - theory.saguaro_sampling(drafted, fan_out, weight), 0)
        return residual[cached].sum() / residual.sum()

    found = [hits(weight) for weight in (1.0, 0.7, 0.4, 0.1)]
    assert all(later >= earlier - 1e-9 for earlier, later in zip(found, found[1:], strict=False))


def test_tokens_of_a_chain():
    assert chain_tokens(1.0, 7) == 8
    assert chain_tokens(0.8, 7) == pytest.approx((1 - 0.8**8) / 0.2)
