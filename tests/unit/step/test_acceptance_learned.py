"""What is learned of acceptance, and what an update of the weights leaves of it."""

import numpy as np
import pytest

from sglang_patches.step.acceptance import Acceptance

LIVE = 2
PROBS = np.full(1000, 0.55, np.float32)
SOURCES = np.full(1000, LIVE, np.uint8)


def estimate(model) -> float:
    return float(model.estimate(PROBS[:1], SOURCES[:1])[0])


@pytest.mark.parametrize("changed", [False, True])
def test_after_an_update_a_few_steps_tell_more_than_all_before(changed):
    acceptance = Acceptance()
    models = [acceptance.of("a"), acceptance.of("b")]
    for model in models:
        model.observe(PROBS, SOURCES, np.ones(1000, bool))
    before = [estimate(model) for model in models]
    assert min(before) > 0.95
    if changed:
        acceptance.weights_changed()
    assert [estimate(model) for model in models] == pytest.approx(before)  # doubted, and not forgotten
    for model in models:
        model.observe(PROBS[:40], SOURCES[:40], np.zeros(40, bool))
        assert (estimate(model) < 0.4) == changed
