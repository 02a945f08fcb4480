"""What a run should measure, computed before it: recorded answers say what drafts get accepted, a pilot load on the same
servers says how long a step takes, and the rest is arithmetic.

Plain decoding yields one token a request and step. Where the whole budget is verified, tokens a step come from a replay of
the drafts (benchmarks.replay). SSSD chooses rows by what it expects, so its own policy is run on the replayed drafts, with
the pilot's step times for a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.replay.method import Method, replay
from benchmarks.replay.methods import METHODS, OURS, Corpus
from benchmarks.serve.cases import Request
from benchmarks.traces import Trace
from datastore_service.engine.engine import Engine
from datastore_service.engine.types import NO_DRAFT, Budget, Entry, Opening
from sglang_patches.workers.length import CANDIDATE_WIDTHS, LengthPolicy
from sglang_patches.workers.requests import accepted_nodes

REPLAYED = {"ngram": "SGLang trie", "ngram_corpus": "SGLang trie + corpus", "sssd_static": OURS}
WITHOUT_PRIOR = ("sssd_cold", "sssd_static")


@dataclass(frozen=True)
class StepTime:
    """t(batch, rows, context): seconds of a step at one batch size by rows of each request, between the pilot's measurements
    along a line, and beyond them as the last line goes on.

    context: mean tokens of a request in the pilot; another_token: seconds that one more adds. admission: seconds that a
    request takes beside its decode steps."""

    rows: Sequence[int]
    seconds: Sequence[float]
    admission: float = 0.0
    context: float = 0.0
    another_token: float = 0.0

    def __call__(self, rows: int, context: float) -> float:
        longer = self.another_token * (context - self.context)
        if rows > self.rows[-1] and len(self.rows) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
            return longer + self.seconds[-1] + slope * (rows - self.rows[-1])
        return longer + float(np.interp(rows, self.rows, self.seconds))


def step_time(pilot: dict, long_pilot: dict, batch: int, rows: int) -> StepTime:
    """From records of two loads, of which the second has longer prompts: their cells if the server counts them, else their
    mean step, each of `rows` rows, admission included."""
    times, long_times = cell_times(pilot, batch, rows), cell_times(long_pilot, batch, rows)
    common = times.keys() & long_times.keys()
    tokens = long_pilot["context"] - pilot["context"]
    more = [long_times[width] - times[width] for width in common]
    another_token = max(0.0, float(np.median(more)) / tokens) if common and tokens > 0 else 0.0
    admission = 0.0
    if pilot["cells"]:
        decoding = sum(total for *_, total in pilot["cells"])
        admission = max(0.0, pilot["wall_seconds"] - decoding) / len(pilot["outputs"])
    return StepTime(*zip(*sorted(times.items()), strict=True), admission, pilot["context"], another_token)


def cell_times(record: dict, batch: int, rows: int) -> dict[int, float]:
    """Seconds of a step at this batch size, by rows of each request."""
    if not record["cells"]:
        return {rows: batch * record["decoded"] / record["steps"] * record["seconds"] / record["tokens"]}
    return {width: total / count for size, width, count, total in record["cells"] if size == batch}


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
    if arm in WITHOUT_PRIOR:
        corpus = Corpus([], vocab_size=corpus.vocab_size)
    if arm in ("sssd", "sssd_cold", "sssd_grpc"):
        simulation = Simulation(corpus, batch, nodes, time)
        loads = [simulation.load(made) for made in traces]
    elif arm in ("plain", "control_adaptive"):
        loads = [fixed_load(made, 1.0, batch, 1, time) for made in traces]
    elif arm == "control":
        loads = [fixed_load(made, 1.0, batch, nodes + 1, time) for made in traces]
    elif arm in REPLAYED:
        method = METHODS[REPLAYED[arm]](corpus, nodes)
        loads = [fixed_load(made, per_step(method, made), batch, nodes + 1, time) for made in traces]
    else:
        return None
    produced, seconds = map(sum, zip(*loads, strict=True))
    return produced / seconds


def per_step(method: Method, traces: Sequence[Trace]) -> float:
    """Tokens a step."""
    return float(np.mean([step.tokens for trace in traces for step in replay(method, trace)] or [1]))


def fixed_load(
    traces: Sequence[Trace], tokens_per_step: float, batch: int, rows: int, time: StepTime
) -> tuple[float, float]:
    """(tokens, seconds) where every step verifies the same rows."""
    tokens = sum(len(trace.output) for trace in traces)
    context = float(np.mean([len(trace.prompt) + len(trace.output) / 2 for trace in traces]))
    return tokens, tokens / (batch * tokens_per_step) * time(rows, context)


class Simulation:
    """SSSD's worker without a model: the engine drafts, the policy chooses, recorded answers accept, the pilot's times pass.

    linear_seconds: what the policy is told of the linear layers. pace: how much slower than it is each step looks to it."""

    def __init__(
        self,
        corpus: Corpus,
        batch: int,
        nodes: int,
        time: StepTime,
        linear_seconds: Callable[[float], float] | None = None,
        pace: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._engine = Engine(corpus.vocab_size, corpus.segments)
        self._batch, self._time, self._pace = batch, time, pace
        self._budget = Budget(nodes)
        widths = [width for width in CANDIDATE_WIDTHS if width <= nodes]
        self.policy = LengthPolicy(
            [*widths, nodes + 1],
            linear_seconds or (lambda rows: time(max(1, round(rows / batch)), time.context)),
        )
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
        policy, batch = self.policy, len(places)
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
        took = self._time(width, float(np.mean([place.known for place in places])))
        policy.times.observe(batch, width, took * self._pace())
        return gained, took


class _Place:
    """A request that is being decoded. known: its tokens."""

    def __init__(self, name: str, trace: Trace) -> None:
        self._name = name
        self._text = np.concatenate([trace.prompt, trace.output])
        self._opening: Opening | None = Opening(prompt_length=len(trace.prompt))
        self._sent, self.known = 0, min(len(trace.prompt) + 1, len(self._text))

    @property
    def ended(self) -> bool:
        return self.known == len(self._text)

    def entry(self, budget: Budget) -> Entry:
        entry = Entry(
            self._name, self._sent, self._text[self._sent : self.known], budget=budget, opening=self._opening
        )
        self._sent, self._opening = self.known, None
        return entry

    def closing(self) -> Entry:
        return Entry(self._name, self._sent, self._text[self._sent :], opening=self._opening, closing=True)

    def rest(self, count: int) -> list[int]:
        return self._text[self.known : self.known + count].tolist()

    def advance(self, tokens: int) -> int:
        gained = min(tokens, len(self._text) - self.known)
        self.known += gained
        return gained
