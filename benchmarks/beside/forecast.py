"""What SAGUARO will do, by the simulator: the product's cache, predictor, fallback and datastore on a virtual clock.

Nothing is fitted. Its inputs are the pairs of the models' choices at these very prompts, the draft process's own times, and the time
of SSSD's steps in the same group, whose host work is nearly SAGUARO's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.beside.costs import DraftTimes
from benchmarks.beside.window import Course, window
from benchmarks.pipeline.pairs import Pair
from benchmarks.pipeline.simulation import KINDS, Pipeline, Setting, Times
from benchmarks.replay.methods import Corpus
from datastore_service.client.embedded import EmbeddedDatastore
from datastore_service.engine.engine import Engine
from datastore_service.protocol.types import Budget
from sglang_patches.drafting.datastore import DatastoreFallback, DatastoreFeed
from sglang_patches.drafting.fallback import Fallback
from sglang_patches.drafting.saguaro import GeometricFanOut, SaguaroFallback
from sglang_patches.drafting.saguaro.fallback import LONGEST_WAIT
from sglang_patches.workers.length import CANDIDATE_WIDTHS, LengthPolicy

DEADLINE = 5.0  # seconds: the datastore of a simulation is never late


class Forecaster:
    """One for all loads of a run, in their order: what the product learns while it serves, the simulated one learns too.

    rows: of a draft forward. policy: of the rows of a step. delay: seconds of a message."""

    def __init__(
        self, corpus: Corpus, nodes: int, rows: int, policy: LengthPolicy, pair: Pair, delay: float
    ) -> None:
        """pair: any; what is asked first is thrown away."""
        feed = DatastoreFeed(EmbeddedDatastore(Engine(corpus.vocab_size, corpus.segments)), DEADLINE)
        datastore = DatastoreFallback(feed, Budget(nodes, depth=nodes))

        def fallback(_: object, clock: Callable[[], float]) -> Fallback:
            return SaguaroFallback(datastore, nodes, LONGEST_WAIT, clock)

        self._times = Times(lambda rows: 1.0, lambda rows: 1.0, delay)
        setting = Setting(
            self._times, nodes, rows, GeometricFanOut, fallback, feed=feed, policy=policy, publish=False
        )
        self._pipeline = Pipeline(setting, [pair], batch=1)

    def load(
        self, pairs: Sequence[Pair], target: Callable[[int], float], draft: DraftTimes, warm: int, until: int
    ) -> dict:
        """A `window` of these requests with its tally. target: seconds by the rows of all requests together."""
        times = replace(self._times, target=target, draft=draft.forward, prefill=draft.prefill)
        pipeline = self._pipeline
        pipeline.begin(pairs, times, len(pairs))
        courses = [Course([], [], []) for _ in pairs]
        while True:
            now, counts = pipeline.decoded
            for course, count in zip(courses, counts, strict=True):
                course.times.append(now)
                course.counts.append(1 + count)  # the prompt holds the answer's first token
            if max(counts) + 1 >= until:
                break
            pipeline.step()
        tally = pipeline.tally
        steps = {kind: tally.steps[kind] for kind in KINDS}
        return window(courses, warm, until) | {"kinds": steps}


def with_first_token(pair: Pair) -> Pair:
    """As decoding meets it: the prefill has emitted the first token."""
    prompt = np.append(pair.prompt, pair.tokens[:1])
    return Pair(prompt, pair.tokens[1:], pair.choices[1:], pair.probabilities[1:])


def policy_of(length: str, nodes: int, seconds: Callable[[float], float]) -> LengthPolicy:
    """As the worker makes it. seconds: of a step by the rows of all its requests."""
    narrower = [width for width in CANDIDATE_WIDTHS if width <= nodes] if length == "adaptive" else []
    return LengthPolicy([*narrower, nodes + 1], seconds)
