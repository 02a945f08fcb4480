"""The methods. `plugin.py` registers with SGLang what stands here; nothing else names a method."""

from __future__ import annotations

import logging
import time
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from datastore_service.protocol.types import Budget

if TYPE_CHECKING:
    from sglang.srt.layers.sampler import Sampler

    from datastore_service.client import Datastore
    from sglang_patches.draft_side.seams import Retriever
    from sglang_patches.draft_side.side import DraftParts
    from sglang_patches.drafting.datastore import DatastoreFeed
    from sglang_patches.drafting.seams import DraftChannel, Fallback
    from sglang_patches.options import Options
    from sglang_patches.verification.verifier import Verifier

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a worker has when it makes a method's parts. budget: of a tree. start_draft: starts the draft process. has_draft_model: whether there is a model for it. now: seconds by a steady clock."""

    options: Options
    datastore: DatastoreFeed
    budget: Budget
    start_draft: Callable[[], DraftChannel]
    has_draft_model: bool = True
    now: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class DraftSurroundings:
    """What a draft process has when it makes a method's parts. lookahead: tokens drafted after each guess. nodes: of the target's
    tree. open_datastore: the worker's, or one of this process's own where the worker's is embedded. now: seconds by a steady clock."""

    options: Options
    lookahead: int
    nodes: int
    open_datastore: Callable[[], Datastore]
    now: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Parts:
    """What makes a method. channel: to its draft side, None if it has none."""

    fallback: Fallback
    channel: DraftChannel | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method, as SGLang and the launcher know it.

    name: its value of `--speculative-algorithm`.
    summary: what it does, in a line.
    parts: makes its parts, on the first tensor-parallel rank.
    supported: server arguments and the one value it works with; any other is refused.
    verifier: makes its sampling scheme, None for the target's own draws.
    draft_parts: makes what drafts in a process of its own, with the model of `--speculative-draft-model-path`; None if nothing does.
    draft_device: where that model runs unless the operator says otherwise, "" for a device of the target's kind.
    needs_draft_model: whether it refuses to start without one.
    early_exit: whether its draft side is told what an early exit of the target expects.
    """

    name: str
    summary: str
    parts: Callable[[Surroundings], Parts]
    supported: Mapping[str, object] = field(default_factory=dict)
    verifier: Callable[[Sampler], Verifier] | None = None
    draft_parts: Callable[[DraftSurroundings], DraftParts] | None = None
    draft_device: str = ""
    needs_draft_model: bool = True
    early_exit: bool = False

    @property
    def draft_process(self) -> bool:
        """Whether it drafts in a process of its own."""
        return self.draft_parts is not None


def _sssd(around: Surroundings) -> Parts:
    from sglang_patches.drafting.datastore import DatastoreFallback

    return Parts(DatastoreFallback(around.datastore, around.budget))


def _saguaro(around: Surroundings) -> Parts:
    from sglang_patches.drafting.datastore import DatastoreFallback
    from sglang_patches.methods.saguaro import fallback_of

    options = around.options
    datastore = DatastoreFallback(around.datastore, around.budget)
    fallback = fallback_of(options.fallback, datastore, options.draft_lookahead, around.now)
    return Parts(fallback, around.start_draft())


def _saguaro_draft(around: DraftSurroundings) -> DraftParts:
    from sglang_patches.draft_side.side import DraftParts, Learner
    from sglang_patches.methods.saguaro import GeometricFanOut, Rollouts

    return DraftParts(lambda: Learner(GeometricFanOut(), Rollouts(around.lookahead)))


def _double(around: Surroundings) -> Parts:
    from sglang_patches.methods.double import Guidance
    from sglang_patches.methods.saguaro import fallback_of

    options = around.options
    guidance = Guidance(around.datastore, around.budget)
    fallback = fallback_of(options.fallback, guidance, lookahead=1, now=around.now)
    return Parts(fallback, around.start_draft())


def _double_draft(around: DraftSurroundings) -> DraftParts:
    from sglang_patches.draft_side.side import DraftParts, Learner
    from sglang_patches.ledger.rates import SpeedRatio
    from sglang_patches.methods.double import AllAccepted, RetrievalChains

    ratio = SpeedRatio(around.now)
    chains = RetrievalChains(around.nodes, ratio)
    return DraftParts(lambda: Learner(AllAccepted(), chains), _phrases(around), ratio)


def _phrases(around: DraftSurroundings) -> Retriever | None:
    from sglang_patches.methods.double import DatastorePhrases, OwnDatastorePhrases

    options = around.options
    if not options.draft_phrase:
        return None
    retriever = OwnDatastorePhrases if options.embedded else DatastorePhrases
    return retriever(around.open_datastore(), options.draft_phrase, options.deadline_ms / 1e3)


def _automatic(around: Surroundings) -> Parts:
    return _double(around) if around.has_draft_model else _sssd(around)


def _automatic_draft(around: DraftSurroundings) -> DraftParts:
    from sglang_patches.draft_side.side import DraftParts, Learner
    from sglang_patches.ledger.rates import SpeedRatio
    from sglang_patches.methods.planner import Branches, LikeliestOutcomes, RowsByValue

    def learner() -> Learner:
        outcomes = LikeliestOutcomes()
        return Learner(outcomes, Branches(around.nodes, outcomes.rates_of))

    return DraftParts(learner, _phrases(around), SpeedRatio(around.now), RowsByValue())


def _duo(around: Surroundings) -> Parts:
    from sglang_patches.drafting.datastore import DatastoreFallback
    from sglang_patches.methods.saguaro import fallback_of

    datastore = DatastoreFallback(around.datastore, around.budget)
    fallback = fallback_of(around.options.fallback, datastore, lookahead=1, now=around.now)
    return Parts(fallback, around.start_draft())


def _duo_draft(around: DraftSurroundings) -> DraftParts:
    from sglang_patches.draft_side.side import DraftParts, Learner
    from sglang_patches.ledger.rates import SpeedRatio
    from sglang_patches.methods.duo import Heads, Sequences

    ratio = SpeedRatio(around.now)
    return DraftParts(lambda: Learner(Heads(), Sequences(around.nodes, ratio)), ratio=ratio)


def _mirror_draft(around: DraftSurroundings) -> DraftParts:
    from sglang_patches.draft_side.side import DraftParts, Learner
    from sglang_patches.methods.mirror import ExpectedOutcomes
    from sglang_patches.methods.saguaro import Rollouts

    return DraftParts(lambda: Learner(ExpectedOutcomes(), Rollouts(around.lookahead)))


def _shared_noise(sampler: Sampler) -> Verifier:
    from sglang_patches.verification.noise_verifier import SharedNoise

    return SharedNoise(sampler)


METHODS = {
    method.name: method
    for method in (
        Method(
            name="SSSD",
            summary="the datastore drafts: what follows the same n-grams in the session and the stored texts",
            parts=_sssd,
            supported={"speculative_draft_model_path": None},
        ),
        Method(
            name="SAGUARO",
            summary="a draft model prepares for the likeliest outcomes of a step while the target verifies it",
            parts=_saguaro,
            verifier=_shared_noise,
            draft_parts=_saguaro_draft,
        ),
        Method(
            name="DOUBLE",
            summary="a draft model checks what the datastore proposes, and the target verifies more of it behind the draft",
            parts=_double,
            verifier=_shared_noise,
            draft_parts=_double_draft,
        ),
        Method(
            name="DUO",
            summary="a draft model on the CPU drafts as many sequences as it is unsure, while the target verifies",
            parts=_duo,
            verifier=_shared_noise,
            draft_parts=_duo_draft,
            draft_device="cpu",
        ),
        Method(
            name="MIRROR",
            summary="a draft model drafts after what an early exit of the target expects, while the target's other layers run",
            parts=_saguaro,
            verifier=_shared_noise,
            draft_parts=_mirror_draft,
            early_exit=True,
        ),
        Method(
            name="ADAPTIVE",
            summary="in each step what is fastest, as measured: no draft, the datastore's, the draft model's, or to wait for it",
            parts=_automatic,
            verifier=_shared_noise,
            draft_parts=_automatic_draft,
            needs_draft_model=False,
        ),
    )
}
DEFAULT = "SSSD"  # of the launcher and the device check
EARLIER_NAMES = {"SPECSTORE": "ADAPTIVE"}  # of methods


@cache
def current_name(name: str) -> str:
    """The name of today for a method's name. Warns of an earlier one, once in a process."""
    current = EARLIER_NAMES.get(name, name)
    if current != name:
        logger.warning(
            "specstore: the method %s is now called %s; version 0.3 drops the earlier name", name, current
        )
    return current


# SGLang's own algorithms that retrieval stands beside: the target's head drafts, or a small model in the target's process.
HEADS = {
    method.name: method
    for method in (
        Method(
            name="EAGLE",
            summary="the target's EAGLE head or MTP layers draft, and the datastore beside them",
            parts=_sssd,
            needs_draft_model=False,
        ),
        Method(
            name="NEXTN",
            summary="the target's MTP layers draft, and the datastore beside them",
            parts=_sssd,
            needs_draft_model=False,
        ),
        Method(
            name="EAGLE3",
            summary="the target's EAGLE-3 head drafts, and the datastore beside it",
            parts=_sssd,
        ),
        Method(
            name="STANDALONE",
            summary="a small model in the target's process drafts, and the datastore beside it",
            parts=_sssd,
        ),
    )
}
ALGORITHMS = ChainMap(METHODS, HEADS)
