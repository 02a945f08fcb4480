"""The worker's loop and the draft side's on one virtual clock: what would run at the same time is played in order of its time."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import brentq

from benchmarks.pipeline.pairs import Pair
from benchmarks.pipeline.theory import chain_tokens
from datastore_service.protocol.tree import EMPTY_TREE, DraftTree, Tier
from datastore_service.protocol.types import Opening
from sglang_patches.drafting.channel import DraftChannel
from sglang_patches.drafting.draft import Candidates, Draft
from sglang_patches.drafting.draft_side import DraftSide
from sglang_patches.drafting.fallback import NO_PATIENCE, Fallback
from sglang_patches.drafting.messages import GREEDY, Answer, Message
from sglang_patches.drafting.model import DraftModel, Row
from sglang_patches.drafting.outcome import Outcome, settle
from sglang_patches.drafting.predictor import OutcomePredictor
from sglang_patches.drafting.requests import RequestState
from sglang_patches.drafting.saguaro import Rollouts
from sglang_patches.drafting.speculation import Speculation
from sglang_patches.drafting.text import Text
from sglang_patches.workers.length import LengthPolicy

KINDS = HIT, WAITED, FELL_BACK, NOTHING = "hit", "waited", "fell back", "nothing"


@dataclass(frozen=True)
class Times:
    """Seconds. target, draft: of a forward over so many rows. delay: of a message, either way. prefill: of the draft model, over so
    many tokens of a prompt."""

    target: Callable[[int], float]
    draft: Callable[[int], float]
    delay: float = 0.0
    prefill: Callable[[int], float] = lambda tokens: 0.0


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class PairModel(DraftModel):
    """The draft model of recorded pairs. At a node that left the target's text it says what it says at the same place of it: no
    verification ever comes there. rows, prefilled: rows and tokens of prompts that were run since they were last set to 0."""

    def __init__(self, pairs: dict[str, Pair]) -> None:
        self._pairs = pairs
        self._filled: set[str] = set()
        self.rows = self.prefilled = 0

    def close(self, draft: Draft) -> None:
        self._filled.discard(draft.session)

    def ready(self, draft: Draft) -> bool:
        return draft.session in self._filled or len(self._pairs[draft.session].prompt) == 1

    def prefill(self, drafts: Sequence[Draft]) -> bool:
        waiting = next((draft for draft in drafts if not self.ready(draft)), None)
        if waiting is None:
            return False
        self._filled.add(waiting.session)
        self.prefilled += waiting.text.length
        return True

    def forward(self, rows: Sequence[Row]) -> list[Candidates | None]:
        self.rows += len(rows)
        return [self._candidates(draft, node) for draft, node in rows]

    def _candidates(self, draft: Draft, node: int) -> Candidates:
        pair = self._pairs[draft.session]
        known = draft.text.length - len(pair.prompt)
        at = min(known + len(draft.trie.path(node)), len(pair) - 1)
        return Candidates(pair.choices[at], pair.probabilities[at])


class TimedDraftSide(DraftChannel):
    """A draft side that has a forward's time for each forward. busy: when it had one running, begin and end."""

    def __init__(self, side: DraftSide, model: PairModel, clock: Clock, times: Times) -> None:
        self._side, self._model, self._clock, self.times = side, model, clock, times
        self._messages: deque[tuple[float, Message]] = deque()
        self._answers: deque[tuple[float, Answer]] = deque()
        self._free = 0.0  # it begins its next round then
        self.busy: list[tuple[float, float]] = []

    def post(self, messages: Sequence[Message]) -> None:
        self._messages += [(self._clock.now + self.times.delay, message) for message in messages]

    def collect(self, seconds: float) -> list[Answer]:
        clock, until = self._clock, self._clock.now + seconds
        while self._round(clock.now):
            pass
        while clock.now < until and not self._arrived():
            if self._answers:
                clock.now = min(until, self._answers[0][0])
            elif not self._round(until):
                clock.now = until
        arrived = []
        while self._arrived():
            arrived.append(self._answers.popleft()[1])
        return arrived

    def close(self) -> None:
        self._messages.clear()

    def _arrived(self) -> bool:
        return bool(self._answers) and self._answers[0][0] <= self._clock.now

    def _round(self, until: float) -> bool:
        """Plays the next round if it begins before `until`."""
        if self._free >= until:
            return False
        heard = []
        while self._messages and self._messages[0][0] <= self._free:
            heard.append(self._messages.popleft()[1])
        answers, model = self._side.hear(heard), self._model
        model.rows = model.prefilled = 0
        worked = self._side.work()
        if worked is None and not answers:
            self._free = min([until, *(arrival for arrival, _ in list(self._messages)[:1])])
            return self._free < until
        if model.rows or model.prefilled:
            begun = self._free
            self._free += self.times.draft(model.rows) if model.rows else 0.0
            self._free += self.times.prefill(model.prefilled) if model.prefilled else 0.0
            self.busy.append((begun, self._free))
        self._answers += [(self._free + self.times.delay, answer) for answer in answers + (worked or [])]
        return True


class PairFallback(Fallback):
    """A drafter that takes no time, whose chains give `tokens` a step on average."""

    def __init__(self, pairs: dict[str, Pair], tokens: float, length: int, seed: int) -> None:
        self._pairs, self._length = pairs, length
        self._rng = np.random.default_rng(seed)
        self._right = brentq(lambda rate: chain_tokens(rate, length) - tokens, 0.0, 1.0)

    def trees(self, states: Sequence[RequestState], misses: Sequence[bool]) -> list[DraftTree]:
        return [
            self._chain(state) if miss else EMPTY_TREE for state, miss in zip(states, misses, strict=True)
        ]

    def _chain(self, state: RequestState) -> DraftTree:
        begin = state.text.length - len(self._pairs[state.session].prompt)
        tokens = self._pairs[state.session].tokens[begin : begin + self._length].copy()
        tokens[self._rng.random(len(tokens)) >= self._right] += 1
        return chain(tokens)


def chain(tokens: np.ndarray) -> DraftTree:
    size = len(tokens)
    parents = np.arange(-1, size - 1, dtype=np.int32)
    return DraftTree(tokens, parents, np.full(size, 0.5, np.float32), np.full(size, Tier.LIVE, np.uint8))


@dataclass
class Tally:
    """What happened. steps, tokens: of single requests, by what their tree was (KINDS). after: (kind before, kind) of each.
    seconds: of all; waiting: of these, for the draft side. hidden: share of the draft model's time beside the target's."""

    steps: Counter = field(default_factory=Counter)
    tokens: Counter = field(default_factory=Counter)
    after: Counter = field(default_factory=Counter)
    seconds: float = 0.0
    waiting: float = 0.0
    hidden: float = 0.0

    @property
    def tokens_a_second(self) -> float:
        return self.tokens.total() / self.seconds

    @property
    def hit_rate(self) -> float:
        return self.steps[HIT] / self.steps.total()

    def tokens_a_step(self, *kinds: str) -> float:
        kinds = kinds or KINDS
        return sum(self.tokens[kind] for kind in kinds) / max(1, sum(self.steps[kind] for kind in kinds))


@dataclass(frozen=True)
class Setting:
    """lookahead: K. guesses: outcomes a request. policy: chooses each step's rows and, of two trees, the better one, as the worker
    does; without one all nodes are verified, and the cache's tree wins."""

    times: Times
    lookahead: int
    guesses: int
    predictor: Callable[[], OutcomePredictor]
    # The pairs by session, and the clock -> what answers a miss.
    fallback: Callable[[dict[str, Pair], Clock], Fallback]
    policy: LengthPolicy | None = None


class Pipeline:
    """A batch of requests, one a pair, decoded as the worker does it: look up, verify, commit, tell. A request that is at its end
    makes place for the same one again."""

    def __init__(self, setting: Setting, pairs: Sequence[Pair]) -> None:
        self._setting, self._clock, self.tally = setting, Clock(), Tally()
        self._pairs: dict[str, Pair] = {}
        model, size = PairModel(self._pairs), setting.guesses * len(pairs)
        side = DraftSide(model, setting.predictor(), Rollouts(setting.lookahead), max(size, len(pairs)), size)
        self._draft = TimedDraftSide(side, model, self._clock, setting.times)
        self._speculation = Speculation(self._draft, setting.lookahead, lambda state: GREEDY, self._clock)
        self._fallback = setting.fallback(self._pairs, self._clock)
        self._names = map(str, itertools.count())
        self._states: list[RequestState] = []
        self._before: dict[RequestState, str] = {}
        self._busy: list[tuple[float, float]] = []
        self.begin(pairs)

    def begin(self, pairs: Sequence[Pair], times: Times | None = None) -> None:
        """Other requests in place of those there are. What was learned stays. times: from now on."""
        self._speculation.close(self._states)
        if times is not None:
            self._draft.times = times
        self._pairs.clear()
        self._pairs |= {name: pair for pair, name in zip(pairs, self._names, strict=False)}
        self._states = [self._open(session) for session in self._pairs]

    @property
    def decoded(self) -> tuple[float, list[int]]:
        """Seconds by the clock, and each request's tokens until now."""
        return self._clock.now, [
            state.text.length - len(self._pairs[state.session].prompt) for state in self._states
        ]

    def run(self, steps: int, warm_up: int = 0) -> Tally:
        """warm_up: steps before those that count."""
        for _ in range(warm_up):
            self.step()
        begun, self.tally = self._clock.now, Tally()
        for _ in range(steps):
            self.step()
        self.tally.seconds = self._clock.now - begun
        self.tally.hidden = _shared(self._draft.busy, self._busy)
        return self.tally

    def _open(self, session: str) -> RequestState:
        prompt = self._pairs[session].prompt
        text, size = Text(prompt), len(prompt)
        state = RequestState(None, session, Opening(prompt_length=size), "", None, 0, text, size, size)
        self._speculation.open([state])
        return state

    def step(self) -> None:
        states, lookahead = self._states, self._setting.lookahead
        depths, begun = [lookahead] * len(states), self._clock.now
        at_once = self._speculation.look_up(states, depths, lambda batch, misses: NO_PATIENCE)
        found = self._speculation.look_up(states, depths, self._fallback.patience)
        self.tally.waiting += self._clock.now - begun
        others = self._fallback.trees(states, [not len(tree) for tree in found])
        trees, width = self._chosen([self._better(*pair) for pair in zip(found, others, strict=True)])
        for state, tree in zip(states, trees, strict=True):
            state.tree = tree
        self._speculation.verification_launched(states)
        seconds = self._draft.times.target(len(states) * width)
        begun, self._clock.now = self._clock.now, self._clock.now + seconds
        self._busy.append((begun, self._clock.now))
        outcomes = settle(states, trees, [state.settled for state in states], [*map(self._emitted, states)])
        if self._setting.policy is not None:
            self._setting.policy.acceptance.learn(outcomes)
            self._setting.policy.times.observe(len(states), width, seconds)
        self._count(outcomes, at_once, found)
        self._commit(outcomes)

    def _better(self, tree: DraftTree, other: DraftTree) -> DraftTree:
        policy = self._setting.policy
        if policy is None or not (len(tree) and len(other)):
            return tree if len(tree) else other
        expected = policy.acceptance.of("").expected
        return other if expected(other) > expected(tree) else tree

    def _chosen(self, trees: Sequence[DraftTree]) -> tuple[list[DraftTree], int]:
        """What is verified of the trees, and each request's rows."""
        if self._setting.policy is None:
            return list(trees), 1 + max(map(len, trees))
        width = self._setting.policy.choose(trees)
        return [tree.first(width - 1) for tree in trees], width

    def _emitted(self, state: RequestState) -> np.ndarray:
        """The target's tokens as far as the tree has them, and one more."""
        pair = self._pairs[state.session]
        tokens, parent, emitted = pair.tokens[state.text.length - len(pair.prompt) :], -1, 0
        below = {
            (int(p), int(t)): at
            for at, (p, t) in enumerate(zip(state.tree.parents, state.tree.tokens, strict=True))
        }
        while (child := below.get((parent, int(tokens[emitted])))) is not None:
            parent, emitted = child, emitted + 1
        return tokens[: emitted + 1]

    def _commit(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            state = outcome.request
            state.text.rewrite(state.settled, outcome.tokens)
            state.settled = state.confirmed = state.text.length
            state.tree = EMPTY_TREE
        self._speculation.outcomes_known(outcomes)
        self._fallback.outcomes_known(outcomes)
        for row, state in enumerate(self._states):
            pair = self._pairs[state.session]
            if state.text.length - len(pair.prompt) + self._setting.lookahead + 2 > len(pair):
                self._speculation.close([state])
                self._states[row] = self._open(state.session)

    def _count(
        self, outcomes: Sequence[Outcome], at_once: Sequence[DraftTree], found: Sequence[DraftTree]
    ) -> None:
        tally = self.tally
        for outcome, *trees in zip(outcomes, at_once, found, strict=True):
            drafted = [len(tree) > 0 for tree in (*trees, outcome.tree)]
            kind = KINDS[drafted.index(True)] if any(drafted) else NOTHING
            tally.steps[kind] += 1
            tally.tokens[kind] += len(outcome.tokens)
            tally.after[self._before.get(outcome.request), kind] += 1
            self._before[outcome.request] = kind


def _shared(draft: Sequence[tuple[float, float]], target: Sequence[tuple[float, float]]) -> float:
    """The share of the draft's intervals that lies within the target's; both ascend."""
    shared, at = 0.0, 0
    for begin, end in draft:
        while at < len(target) and target[at][1] <= begin:
            at += 1
        for other_begin, other_end in itertools.takewhile(lambda of: of[0] < end, target[at:]):  # noqa: B023
            shared += min(end, other_end) - max(begin, other_begin)
    return shared / max(1e-12, sum(end - begin for begin, end in draft))
