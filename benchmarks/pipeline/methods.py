"""A method of the registry as the simulator plays it: its own parts, on the virtual clocks."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.pipeline.simulation import Around, Setting, Times
from datastore_service.client import Datastore
from datastore_service.protocol.types import Budget
from sglang_patches.drafting.datastore import DatastoreFeed
from sglang_patches.drafting.draft_side import DraftParts
from sglang_patches.drafting.fallback import Fallback
from sglang_patches.drafting.registry import METHODS, DraftSurroundings, Surroundings
from sglang_patches.options import Options
from sglang_patches.workers.length import LengthPolicy


def setting_of(
    name: str,
    options: Options,
    times: Times,
    open_datastore: Callable[[], Datastore],
    policy: LengthPolicy | None = None,
    publish: bool = True,
) -> Setting:
    """name: of a method with a draft process. open_datastore: the worker's, and another for the draft process. Neither takes time."""
    method, nodes = METHODS[name], options.nodes
    assert method.draft_parts is not None, name
    feed = DatastoreFeed(open_datastore(), options.deadline_ms / 1e3)

    def parts(now: Callable[[], float]) -> DraftParts:
        return method.draft_parts(
            DraftSurroundings(options, options.draft_lookahead, nodes, open_datastore, now)
        )

    def fallback(around: Around) -> Fallback:
        budget, channel = Budget(nodes, depth=nodes), lambda: around.channel
        surroundings = Surroundings(
            options, feed, budget, around.acceptance.estimate, channel, now=around.clock
        )
        return method.parts(surroundings).fallback

    return Setting(
        times, nodes, options.draft_rows, parts, fallback, feed=feed, policy=policy, publish=publish
    )
