"""What a method with a draft process will do, by the simulator: the method's own parts on a virtual clock.

Nothing is fitted. Its inputs are the pairs of the models' choices at these very prompts, the draft process's own times, and the time
of SSSD's steps in the same group, whose host work is nearly the method's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.beside.costs import DraftTimes
from benchmarks.beside.window import Course, window
from benchmarks.pipeline.methods import setting_of
from benchmarks.pipeline.pairs import Pair
from benchmarks.pipeline.simulation import KINDS, EarlyExit, Pipeline, Times
from benchmarks.replay.methods import Corpus
from datastore_service.client.embedded import EmbeddedDatastore
from datastore_service.engine.engine import Engine
from sglang_patches.options import Options
from sglang_patches.step.length import LengthPolicy


class Forecaster:
    """One for all loads of a run, in their order: what the product learns while it serves, the simulated one learns too.

    name: of the method in the registry. exit: of one that reads an early exit. corpus: what its datastores know. policy: of the rows of a
    step. delay: seconds of a message.
    """

    def __init__(
        self,
        name: str,
        options: Options,
        corpus: Corpus,
        policy: LengthPolicy,
        pair: Pair,
        delay: float,
        exit: EarlyExit | None = None,
    ) -> None:
        """pair: any; what is asked first is thrown away."""

        def store() -> EmbeddedDatastore:
            return EmbeddedDatastore(lambda: Engine(corpus.vocab_size, corpus.segments))

        self._times = Times(lambda rows: 1.0, lambda rows: 1.0, delay)
        setting = setting_of(name, options, self._times, store, policy, exit=exit)
        self._pipeline = Pipeline(setting, [pair], batch=1)

    def load(
        self, pairs: Sequence[Pair], target: Callable[[int], float], draft: DraftTimes, warm: int, until: int
    ) -> dict:
        """A `window` of these requests with its tally. target: seconds by the rows of all requests together."""
        of_draft = {"draft": draft.forward, "prefill": draft.prefill, "around": draft.around_forward}
        times = replace(self._times, target=target, **of_draft)
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
    exits = {layer: (choices[1:], chances[1:]) for layer, (choices, chances) in pair.exits.items()}
    return Pair(prompt, pair.tokens[1:], pair.choices[1:], pair.probabilities[1:], exits)
