"""What is learned of acceptance, and what an update of the weights leaves of it."""

import numpy as np
import pytest

from datastore_service.protocol.tree import DraftTree, Tier
from sglang_patches.step.acceptance import Acceptance

TENANTS = ("a", "b")


def siblings(count):
    """A tree of the root's children, all as likely."""
    return DraftTree(
        np.arange(count, dtype=np.int32),
        np.full(count, -1, np.int32),
        np.full(count, 0.55, np.float32),
        np.full(count, Tier.LIVE, np.uint8),
    )


def estimates(acceptance) -> list[float]:
    return acceptance.estimate([siblings(1)] * len(TENANTS), TENANTS).tolist()


@pytest.mark.parametrize("changed", [False, True])
def test_after_an_update_a_few_steps_tell_more_than_all_before(changed):
    acceptance = Acceptance()
    for tenant in TENANTS:
        acceptance.observe(tenant, [siblings(1000)], np.ones(1000, bool))
    before = estimates(acceptance)
    assert min(before) > 0.95
    if changed:
        acceptance.weights_changed()
    assert estimates(acceptance) == pytest.approx(before)  # doubted, and not forgotten
    for tenant in TENANTS:
        acceptance.observe(tenant, [siblings(40)], np.zeros(40, bool))
    assert [chance < 0.4 for chance in estimates(acceptance)] == [changed] * len(TENANTS)
