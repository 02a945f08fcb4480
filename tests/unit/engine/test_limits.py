"""The memory that limits permit is what an engine takes at most, however its text comes."""

import numpy as np
import pytest

from datastore_service.engine.engine import Engine
from datastore_service.engine.limits import Limits
from datastore_service.protocol.types import MAX_NODES, Budget, Entry, Opening, Rejected, Status

VOCABULARY = 50_000
WIDE = Budget(nodes=MAX_NODES, depth=8, children=MAX_NODES)


@pytest.mark.parametrize("size", [1, 130, 700, 9_000, 60_000])
@pytest.mark.parametrize("publish", [True, False], ids=["published", "kept"])
def test_an_engine_takes_no_more_than_its_limits_permit(size, publish):
    rng = np.random.default_rng(size)
    limits = Limits(sessions=10, tokens=60_000, live_tokens=1 << 17, conversations=10, refusals=8)
    engine = Engine(VOCABULARY, limits=limits)
    most = 0
    for number in range(30):
        text = rng.integers(0, VOCABULARY, size).astype(np.int32)
        opening = Opening(conversation=f"c{number}", publish=publish)
        (reply,) = engine.step([Entry(f"s{number}", tokens=text, opening=opening, budget=WIDE)])
        for at in range(min(size, 5) if reply.status is Status.OK else 0):
            refused = (Rejected(at, np.arange(2, dtype=np.int32)),)
            engine.step([Entry(f"s{number}", size, rejected=refused, budget=WIDE)])
        most = max(most, in_all(engine))
        if number >= 9 or reply.status is Status.OVER_BUDGET:
            for ended in (number - 9, number):
                engine.step([Entry(f"s{ended}", size, closing=True)])
        most = max(most, in_all(engine))
    assert limits.most_bytes / 5_000 < most <= limits.most_bytes
    assert engine.stats().merge_failures == 0


def in_all(engine: Engine) -> int:
    return sum(tier.nbytes for tier in engine.stats().tiers.values())


def test_the_default_limits_of_a_namespace_permit_six_and_a_half_gigabytes():
    """Whoever sizes a machine multiplies by the namespaces."""
    assert Limits().most_bytes == pytest.approx(6.5e9, rel=0.01)
