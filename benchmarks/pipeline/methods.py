"""A method of the registry as the simulator plays it: its own parts, on the virtual clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.pipeline.simulation import Around, EarlyExit, Setting, Times
from datastore_service.client import Datastore
from datastore_service.protocol.types import Budget
from sglang_patches.draft_side.side import DraftParts, Learner
from sglang_patches.drafting.datastore import DatastoreFeed
from sglang_patches.drafting.seams import Fallback
from sglang_patches.methods.double import AllAccepted
from sglang_patches.methods.registry import METHODS, DraftSurroundings, Surroundings
from sglang_patches.methods.saguaro import Rollouts
from sglang_patches.options import Options
from sglang_patches.step.length import CANDIDATE_WIDTHS, LengthPolicy

NEVER = 1e9  # seconds of a draft forward that is never in time


def setting_of(
    name: str,
    options: Options,
    times: Times,
    open_datastore: Callable[[], Datastore],
    policy: LengthPolicy | None = None,
    exit: EarlyExit | None = None,
) -> Setting:
    """name: of a method. exit: of a method that reads one. open_datastore: the worker's, and another for the draft process. Neither takes time."""
    method, nodes = METHODS[name], options.nodes
    feed = DatastoreFeed(lambda _: open_datastore(), options.deadline_ms / 1e3)
    if method.draft_parts is None:
        times = replace(times, draft=lambda rows: NEVER)

    def parts(now: Callable[[], float]) -> DraftParts:
        if method.draft_parts is None:
            return DraftParts(lambda: Learner(AllAccepted(), Rollouts(1)))
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
        times,
        nodes,
        options.draft_rows,
        parts,
        fallback,
        feed=feed,
        policy=policy,
        publish=options.publish == "on",
        exit=exit,
    )


def policy_of(length: str, nodes: int, seconds: Callable[[float], float]) -> LengthPolicy:
    """As the worker makes it. seconds: of a step by the rows of all its requests."""
    narrower = [width for width in CANDIDATE_WIDTHS if width <= nodes] if length == "adaptive" else []
    return LengthPolicy([*narrower, nodes + 1], seconds)
