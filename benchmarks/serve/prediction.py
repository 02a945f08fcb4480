"""What a run should measure, computed before it: recorded answers say what drafts get accepted, a pilot load on the same
servers says how long a step takes, and the rest is arithmetic.

Plain decoding yields one token a request and step. NGRAM's tokens a step come from its replay (benchmarks.replay). SSSD
chooses rows by what it expects, so its own policy is run on the replayed drafts, with the pilot's step times for a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.replay.method import replay
from benchmarks.replay.methods import PEERS, Corpus
from benchmarks.serve.cases import Request
from benchmarks.traces import Trace
from datastore_service.engine.engine import Engine
from datastore_service.engine.types import NO_DRAFT, Budget, Entry, Opening
from sglang_patches.workers.length import CANDIDATE_WIDTHS, LengthPolicy
from sglang_patches.workers.requests import accepted_nodes

REPLAYED = {"ngram": "SGLang trie", "ngram_corpus": "SGLang trie + corpus"}


@dataclass(frozen=True)
class StepTime:
    """t(batch, rows): seconds of a step at one batch size by rows of each request, between the pilot's measurements along a
    line, and beyond them as the last line goes on. admission: seconds that a request takes beside its decode steps."""

    rows: Sequence[int]
    seconds: Sequence[float]
    admission: float = 0.0

    def __call__(self, rows: int) -> float:
        if rows > self.rows[-1] and len(self.rows) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
            return self.seconds[-1] + slope * (rows - self.rows[-1])
        return float(np.interp(rows, self.rows, self.seconds))


def step_time(pilot: dict, batch: int, rows: int) -> StepTime:
    """From a measured record: its cells if the server counts them, else its mean step, each of `rows` rows, admission
    included."""
    if not pilot["cells"]:
        return StepTime(
            [rows], [batch * pilot["decoded"] / pilot["steps"] * pilot["seconds"] / pilot["tokens"]]
        )
    cells = sorted((width, total / count) for size, width, count, total in pilot["cells"] if size == batch)
    decoding = sum(total for *_, total in pilot["cells"])
    admission = max(0.0, pilot["wall_seconds"] - decoding) / len(pilot["outputs"])
    return StepTime(*zip(*cells, strict=True), admission)


def traces_of(group: Sequence[Request], max_tokens: int) -> list[Trace]:
    return [
        Trace(request.category, np.array(request.prompt, np.int32), request.output[:max_tokens])
        for request in group
        if request.output is not None
    ]


def predict(
    arm: str,
    groups: Sequence[Sequence[Request]],
    batch: int,
    nodes: int,
    time: StepTime,
    corpus: Corpus,
    max_tokens: int,
) -> float | None:
    """Tokens a second of the arm over these groups; None for an arm or answers that cannot be replayed."""
    traces = [traces_of(group, max_tokens) for group in groups]
    if any(len(made) < len(group) for made, group in zip(traces, groups, strict=True)):
        return None
    if arm in ("plain", "control_adaptive"):
        return batch / time(1)
    if arm == "control":
        return batch / time(nodes + 1)
    if arm in REPLAYED:
        method = PEERS[REPLAYED[arm]](corpus, nodes)
        steps = [step.tokens for made in traces for trace in made for step in replay(method, trace)]
        return batch * float(np.mean(steps)) / time(nodes + 1)
    if arm in ("sssd", "sssd_grpc"):
        simulation = Simulation(corpus, batch, nodes, time)
        produced, seconds = map(sum, zip(*(simulation.load(made) for made in traces), strict=True))
        return produced / seconds
    return None


class Simulation:
    """SSSD's worker without a model: the engine drafts, the policy chooses, recorded answers accept, the pilot's times pass."""

    def __init__(self, corpus: Corpus, batch: int, nodes: int, time: StepTime) -> None:
        self._engine = Engine(corpus.vocab_size, corpus.segments)
        self._batch, self._time = batch, time
        self._budget = Budget(nodes)
        widths = [width for width in CANDIDATE_WIDTHS if width <= nodes]
        self._policy = LengthPolicy([*widths, nodes + 1], lambda rows: time(max(1, round(rows / batch))))
        self._names = iter(range(1 << 30))

    def load(self, traces: Sequence[Trace]) -> tuple[float, float]:
        """A steady load (benchmarks.serve.load): (tokens produced, seconds) until a place stays empty."""
        waiting = iter(traces)
        places = [
            _Place(str(next(self._names)), trace)
            for trace, _ in zip(waiting, range(self._batch), strict=False)
        ]
        produced, seconds = float(len(places)), self._time.admission * len(places)
        while True:
            for i, place in enumerate(places):
                if not place.ended:
                    continue
                self._engine.step([place.closing()])
                following = next(waiting, None)
                if following is None:
                    return produced, seconds
                places[i] = _Place(str(next(self._names)), following)
                produced, seconds = produced + 1, seconds + self._time.admission
            gained, took = self._step(places)
            produced, seconds = produced + gained, seconds + took

    def _step(self, places: Sequence[_Place]) -> tuple[int, float]:
        policy, batch = self._policy, len(places)
        budget = self._budget if policy.wants_draft(batch) else NO_DRAFT
        trees = [reply.tree for reply in self._engine.step([place.entry(budget) for place in places])]
        width = policy.choose(trees)
        gained = 0
        for place, tree in zip(places, trees, strict=True):
            verified = tree.first(width - 1)
            accepted = accepted_nodes(verified, place.rest(len(verified)))
            if width > 1:
                policy.acceptance.observe(verified, accepted)
            gained += place.advance(int(accepted.sum()) + 1)
        took = self._time(width)
        policy.times.observe(batch, width, took)
        return gained, took


class _Place:
    """A request that is being decoded."""

    def __init__(self, name: str, trace: Trace) -> None:
        self._name = name
        self._text = np.concatenate([trace.prompt, trace.output])
        self._opening: Opening | None = Opening(prompt_length=len(trace.prompt))
        self._sent, self._known = 0, min(len(trace.prompt) + 1, len(self._text))

    @property
    def ended(self) -> bool:
        return self._known == len(self._text)

    def entry(self, budget: Budget) -> Entry:
        entry = Entry(
            self._name, self._sent, self._text[self._sent : self._known], budget=budget, opening=self._opening
        )
        self._sent, self._opening = self._known, None
        return entry

    def closing(self) -> Entry:
        return Entry(self._name, self._sent, self._text[self._sent :], opening=self._opening, closing=True)

    def rest(self, count: int) -> list[int]:
        return self._text[self._known : self._known + count].tolist()

    def advance(self, tokens: int) -> int:
        gained = min(tokens, len(self._text) - self._known)
        self._known += gained
        return gained
