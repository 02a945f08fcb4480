"""MIRROR's equations against each other and against simulated rounds, and where its propositions hold."""

import numpy as np
import pytest

from benchmarks.pipeline.theory.chain import chain_tokens
from benchmarks.pipeline.theory.mirror import (
    draft_steps,
    overlap_mass,
    saved,
    serial_time,
    step_time,
)

PREFIX, SUFFIX = 12.0, 10.0


def distribution(rng, size=40, heat=1.0):
    raw = np.exp(rng.normal(size=size) / heat)
    return raw / raw.sum()


def test_generation_is_free_up_to_the_overlap_budget():
    """Equations 10 and 14, section 3.4: a line of slope 0, then of slope 1."""
    times = [step_time(PREFIX, SUFFIX, generation) for generation in range(21)]
    assert np.diff(times).tolist() == [0.0] * 10 + [1.0] * 10
    assert times[0] == PREFIX + SUFFIX


@pytest.mark.parametrize("generation", [0.0, 4.0, 10.0, 25.0])
@pytest.mark.parametrize("rendezvous", [0.0, 0.5, 12.0])
def test_what_is_saved_is_the_smaller_of_budget_and_generation(generation, rendezvous):
    """Appendix C: faster than serial drafting exactly where the messages cost less than that."""
    serial, mirror = (
        serial_time(PREFIX, SUFFIX, generation),
        step_time(PREFIX, SUFFIX, generation, rendezvous),
    )
    assert serial - mirror == pytest.approx(saved(SUFFIX, generation, rendezvous))
    assert (mirror < serial) == (rendezvous < min(SUFFIX, generation))


def test_a_draft_that_streams_needs_fewer_steps():
    assert [draft_steps(7, streams) for streams in (1, 2, 2.5, 7)] == [7, 4, 3, 1]


def test_a_longer_window_pays_as_long_as_it_is_hidden():
    """Tokens a second by gamma: it rises inside the budget, and falls somewhere behind it."""
    forward, acceptance = 1.0, 0.8
    speeds = [
        chain_tokens(acceptance, window) / step_time(PREFIX, SUFFIX, window * forward)
        for window in range(1, 40)
    ]
    inside = int(SUFFIX / forward)
    assert np.all(np.diff(speeds[:inside]) > 0) and speeds[-1] < max(speeds)


def test_the_overlap_mass_does_not_fall_with_more_choices():
    """Proposition 1: and it is 1 with the whole vocabulary. So is the chance that the first token is among them."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        target, early = distribution(rng), distribution(rng)
        masses = [overlap_mass(target, early, count) for count in range(1, 41)]
        assert np.all(np.diff(masses) >= -1e-12) and masses[-1] == pytest.approx(1.0)


def test_a_closer_exit_has_nearly_the_target_s_own_mass():
    """Proposition 2: Omega >= q(S*) - 2 kappa epsilon, and the same tokens once epsilon is below half the margin."""
    rng, choices = np.random.default_rng(1), 8
    for _ in range(200):
        target = distribution(rng)
        early = np.abs(target + rng.uniform(-0.01, 0.01, target.shape))
        error = np.abs(early - target).max()
        own = overlap_mass(target, target, choices)
        assert overlap_mass(target, early, choices) >= own - 2 * choices * error - 1e-12
        ordered = np.sort(target)[::-1]
        if error < (ordered[choices - 1] - ordered[choices]) / 2:
            assert overlap_mass(target, early, choices) == pytest.approx(own)


def test_a_deeper_exit_is_not_always_better():
    """Proposition 2 says "decreases with depth": what it proves is a limit. An exit nearer to the target in every token may have less
    of its mass among the first choices."""
    target = np.array([0.50, 0.30, 0.20])
    far, near = np.array([0.80, 0.10, 0.10]), np.array([0.33, 0.34, 0.33])
    assert np.abs(near - target).max() < np.abs(far - target).max()
    assert overlap_mass(target, near, 1) < overlap_mass(target, far, 1)


def fallbacks(overlap, acceptance, window, every_row, rounds=20_000, seed=0):
    """Share of rounds whose correction is on no prepared path. At each row the exit has the target's token with probability
    `overlap`; the drafted token is right with probability `acceptance`."""
    rng = np.random.default_rng(seed)
    found = 0
    for _ in range(rounds):
        accepted = 0
        while accepted < window and rng.random() < acceptance:
            accepted += 1
        known = rng.random() < overlap
        found += known if every_row or accepted == 0 else False
    return 1 - found / rounds


def test_the_corollary_s_bound_holds_with_choices_at_every_row():
    """FF <= 1 - Omega, with choices at each row as in figure 1."""
    rate = fallbacks(0.7, 0.8, 7, every_row=True)
    assert rate == pytest.approx(0.3, abs=0.02)


def test_it_does_not_hold_with_choices_at_the_root_alone():
    """Equation 8 has branches after the first position only. There a correction further down is on none of them: a greedy draft
    does not go on with a token that it has not drafted."""
    rate = fallbacks(0.7, 0.8, 7, every_row=False)
    assert rate > 1 - 0.7 + 0.3
    assert rate == pytest.approx(1 - 0.2 * 0.7, abs=0.02)
