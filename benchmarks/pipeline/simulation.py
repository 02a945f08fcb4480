"""The worker's loop and the draft side's on one virtual clock: what would run at the same time is played in order of its time."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from benchmarks.pipeline.pairs import Pair
from benchmarks.pipeline.theory import chain_tokens
from benchmarks.report.statistics import Interval, ratio_of_sums, throughput_ratio
from datastore_service.protocol.tree import EMPTY_TREE, DraftTree, Tier
from datastore_service.protocol.types import Budget, Opening
from sglang_patches.draft_side.draft import Candidates, Draft
from sglang_patches.draft_side.seams import DraftModel, Row
from sglang_patches.draft_side.side import DraftParts, DraftSide
from sglang_patches.drafting.datastore import DatastoreFeed
from sglang_patches.drafting.seams import NO_PATIENCE, DraftChannel, Fallback
from sglang_patches.drafting.speculation import Choices, Speculation
from sglang_patches.drafting.union import Part, best_trees
from sglang_patches.exchange.messages import GREEDY, Answer, Message
from sglang_patches.exchange.text import Text
from sglang_patches.ledger.outcome import Outcome, settle
from sglang_patches.ledger.requests import RequestState
from sglang_patches.step.acceptance import Acceptance
from sglang_patches.step.length import LengthPolicy
from sglang_patches.verification.layout import likeliest_ends, pack, pack_reached

KINDS = HIT, WAITED, FELL_BACK, NOTHING = "hit", "waited", "fell back", "nothing"


@dataclass(frozen=True)
class Times:
    """Seconds. target, draft: of a forward over so many rows. delay: of a message, either way. prefill: of the draft model, over so
    many tokens of a prompt. around: of a round of the draft side, but for its model's."""

    target: Callable[[int], float]
    draft: Callable[[int], float]
    delay: float = 0.0
    prefill: Callable[[int], float] = lambda tokens: 0.0
    around: float = 0.0


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
        at = min(draft.text.length - len(pair.prompt) + len(draft.trie.path(node)), len(pair) - 1)
        return Candidates(pair.choices[at], pair.probabilities[at])


class TimedDraftSide(DraftChannel):
    """A draft side that has a forward's time for each forward. busy: when it had a forward running, begin and end."""

    def __init__(self, setting: Setting, model: PairModel, clock: Clock) -> None:
        self._model, self._clock, self.times = model, clock, setting.times
        self._side = DraftSide(model, setting.parts(self.now), setting.draft_rows, setting.draft_rows)
        self._messages: deque[tuple[float, Message]] = deque()
        self._answers: deque[tuple[float, Answer]] = deque()
        self._free = 0.0  # it begins its next round then
        self.busy: list[tuple[float, float]] = []

    def now(self) -> float:
        """What the draft side reads: a round begins when it is free, and its forward takes its time."""
        return self._free + (self.times.draft(self._model.rows) if self._model.rows else 0.0)

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
        model = self._model
        model.rows = model.prefilled = 0
        answers = self._side.hear(heard)
        worked = self._side.work()
        if worked is None and not answers:
            self._free = min([until, *(arrival for arrival, _ in list(self._messages)[:1])])
            return self._free < until
        if model.rows or model.prefilled:
            begun, self._free = self._free, self.now()
            self._free += self.times.prefill(model.prefilled) if model.prefilled else 0.0
            self.busy.append((begun, self._free))
            self._free += self.times.around
        self._answers += [(self._free + self.times.delay, answer) for answer in answers + (worked or [])]
        return True


class PairFallback(Fallback):
    """A datastore that takes no time. It has a chain for every request, as the product's fallback has, and its chains give `tokens` a
    step on average."""

    def __init__(self, pairs: dict[str, Pair], tokens: float, length: int, seed: int) -> None:
        self._pairs, self._length = pairs, length
        self._rng = np.random.default_rng(seed)
        self._right = rate_of(tokens, length)

    def parts(self, states: Sequence[RequestState], found: Sequence[DraftTree]) -> list[list[Part]]:
        return [[Part(self._chain(state))] for state in states]

    def _chain(self, state: RequestState) -> DraftTree:
        pair = self._pairs[state.session]
        begin = state.text.length - len(pair.prompt)
        tokens = pair.tokens[begin : begin + self._length].copy()
        tokens[self._rng.random(len(tokens)) >= self._right] += 1
        return chain(tokens, self._right)


def rate_of(tokens: float, length: int) -> float:
    """How often each token of a chain of `length` is right, if a step of it gives `tokens` on average."""
    from scipy.optimize import brentq

    return brentq(lambda rate: chain_tokens(rate, length) - tokens, 0.0, 1.0)


def chain(tokens: np.ndarray, rate: float) -> DraftTree:
    """A datastore's tree of one path, of which each token is right with this probability."""
    size = len(tokens)
    parents = np.arange(-1, size - 1, dtype=np.int32)
    estimates = (rate ** np.arange(1, size + 1)).astype(np.float32)
    return DraftTree(tokens, parents, estimates, np.full(size, Tier.LIVE, np.uint8))


@dataclass
class Tally:
    """What happened. steps, tokens: of single requests, by what their tree was (KINDS). after: (kind before, kind) of each.
    seconds: of all; waiting: of these, for the draft side. hidden: share of the draft model's time beside the target's.
    parts: the same of each pair; a step's seconds belong to its requests in equal parts."""

    steps: Counter = field(default_factory=Counter)
    tokens: Counter = field(default_factory=Counter)
    after: Counter = field(default_factory=Counter)
    seconds: float = 0.0
    waiting: float = 0.0
    hidden: float = 0.0
    parts: list[Tally] = field(default_factory=list)

    @staticmethod
    def of(parts: Sequence[Tally], hidden: float) -> Tally:
        whole = Tally(hidden=hidden, parts=list(parts))
        for part in parts:
            for mine, its in zip(whole._counters(), part._counters(), strict=True):
                mine.update(its)
            whole.seconds, whole.waiting = whole.seconds + part.seconds, whole.waiting + part.waiting
        return whole

    def _counters(self) -> tuple[Counter, ...]:
        return self.steps, self.tokens, self.after

    @property
    def tokens_a_second(self) -> float:
        return self.tokens.total() / self.seconds

    @property
    def hit_rate(self) -> float:
        return self.steps[HIT] / self.steps.total()

    def tokens_a_step(self, *kinds: str) -> float:
        kinds = kinds or KINDS
        return sum(self.tokens[kind] for kind in kinds) / max(1, sum(self.steps[kind] for kind in kinds))

    def each(self, name: str) -> list[float]:
        """One of COUNTS, of each pair."""
        return [COUNTS[name](part) for part in self.parts]

    def per(self, name: str, of: str = "steps") -> Interval:
        return ratio_of_sums(self.each(name), self.each(of))

    def over_plain(self, plain: float) -> Interval:
        """Throughput over plain decoding's, which is `plain` tokens per second."""
        return ratio_of_sums([count / plain for count in self.each("tokens")], self.each("seconds"))

    def over(self, first: Tally, name: str, of: str = "steps") -> Interval | None:
        """A count by another, over what they are in `first`, pair by pair; None where that has none."""
        if not any(first.each(name)):
            return None
        return throughput_ratio(self.each(name), self.each(of), first.each(name), first.each(of))

    @property
    def hits_by_session(self) -> tuple[float, float, float]:
        """The share of a session's steps that had a hit: that of the session with the fewest, the median, and the most."""
        shares = [part.hit_rate for part in self.parts if part.steps]
        return min(shares), float(np.median(shares)), max(shares)


COUNTS: dict[str, Callable[[Tally], float]] = {
    "tokens": lambda tally: tally.tokens.total(),
    "seconds": lambda tally: tally.seconds,
    "hits": lambda tally: tally.steps[HIT],
    "steps": lambda tally: tally.steps.total(),
}


class EarlyExit(NamedTuple):
    """layer: of the pairs' exits. share: of the target's forward that has passed when it speaks. choices: that it says of a row."""

    layer: int
    share: float
    choices: int


class Around(NamedTuple):
    """What a fallback is made with. pairs: by session. acceptance: learned of drafts. channel: to the draft side."""

    pairs: dict[str, Pair]
    clock: Clock
    acceptance: Acceptance
    channel: DraftChannel


@dataclass(frozen=True)
class Setting:
    """lookahead: K, most nodes of a tree. draft_rows: of a draft forward, and outcomes of a step that are drafted for, over all
    requests as in the product (`Options.draft_rows`). parts: makes what drafts, with the draft side's clock.
    fallback: makes what answers a miss. feed: tells a datastore of the
    texts, if the fallback asks one. policy: chooses each step's rows, as the worker does; without one all nodes are verified.
    publish: whether a request that has ended is known to the datastore from then on. exit: the target's early exit that the draft
    side hears, None without."""

    times: Times
    lookahead: int
    draft_rows: int
    parts: Callable[[Callable[[], float]], DraftParts]
    fallback: Callable[[Around], Fallback]
    feed: DatastoreFeed | None = None
    policy: LengthPolicy | None = None
    publish: bool = True
    exit: EarlyExit | None = None


class Step(NamedTuple):
    """A step of the worker. Times are seconds of the clock. kinds: of KINDS, by request. tokens: of all requests."""

    begun: float
    launched: float
    ended: float
    kinds: list[str]
    tokens: int


@dataclass
class _Play:
    """A request of the batch. tally: where it counts. before: what its last tree was, None before the first step, which nothing
    could predict."""

    pair: Pair
    tally: Tally
    before: str | None = None


class Pipeline:
    """Requests, one a pair, decoded as the worker does it: look up, verify, commit, tell. One that is at its end makes place for the
    next."""

    def __init__(self, setting: Setting, pairs: Sequence[Pair], batch: int) -> None:
        self._setting, self._clock = setting, Clock()
        self._pairs: dict[str, Pair] = {}  # by session
        self._draft = TimedDraftSide(setting, PairModel(self._pairs), self._clock)
        self._speculation = Speculation(self._draft, setting.lookahead, lambda state: GREEDY, self._clock)
        self._acceptance = setting.policy.acceptance if setting.policy else Acceptance()
        self._fallback = setting.fallback(Around(self._pairs, self._clock, self._acceptance, self._draft))
        self._feeds = [self._speculation, *([setting.feed] if setting.feed else [])]
        self._playing: dict[RequestState, _Play] = {}
        self.steps: list[Step] = []
        self.begin(pairs, setting.times, batch)

    def begin(self, pairs: Sequence[Pair], times: Times, batch: int) -> None:
        """Other requests in place of those there are. What was learned stays. times: from now on."""
        for state in list(self._playing):
            self._end(state)
        self._all, self._draft.times = pairs, times
        self._tallies = [Tally() for _ in pairs]
        self._waiting = self._plays()
        for _ in range(batch):
            self._begin()

    @property
    def decoded(self) -> tuple[float, list[int]]:
        """Seconds by the clock, and the tokens of each request of the batch until now."""
        lengths = [state.text.length - len(play.pair.prompt) for state, play in self._playing.items()]
        return self._clock.now, lengths

    @property
    def tally(self) -> Tally:
        """Of all pairs until now."""
        return Tally.of(self._tallies, self._hidden())

    def run(self, warm_up: int = 0) -> Tally:
        """Every pair is played once. The first `warm_up` pairs do not count."""
        left = set(map(id, self._tallies))
        while left & {id(play.tally) for play in self._playing.values()}:
            for play in self.step():
                left.discard(id(play.tally))
        return Tally.of(self._tallies[warm_up:], self._hidden())

    @property
    def drafted(self) -> list[tuple[float, float]]:
        """When the draft model was busy, begin and end."""
        return self._draft.busy

    def _hidden(self) -> float:
        return _shared(self._draft.busy, [(step.launched, step.ended) for step in self.steps])

    def _plays(self) -> Iterator[_Play]:
        """All pairs, then the same again to keep the batch full, which does not count."""
        yield from map(_Play, self._all, self._tallies)
        for pair in itertools.cycle(self._all):
            yield _Play(pair, Tally())

    def _begin(self) -> None:
        play, session = next(self._waiting), str(len(self._pairs))
        self._pairs[session] = play.pair
        text = Text(play.pair.prompt)
        length = text.length
        opening = Opening(publish=self._setting.publish, prompt_length=length)
        state = RequestState(None, session, opening, "", None, 0, text, length, length)
        self._playing[state] = play
        for feed in self._feeds:
            feed.open([state])

    def _end(self, state: RequestState) -> None:
        del self._playing[state]
        for feed in self._feeds:
            feed.close([state])

    def step(self) -> list[_Play]:
        """Those that are at their end."""
        states, lookahead = list(self._playing), self._setting.lookahead
        depths, begun = [lookahead] * len(states), self._clock.now
        at_once = self._speculation.look_up(states, depths, lambda batch, missed: NO_PATIENCE)
        found = self._speculation.look_up(states, depths, self._fallback.patience)
        waited = self._clock.now - begun
        others = self._fallback.parts(states, found)
        trees, widths = self._chosen(self._best(found, others))
        for state, tree in zip(states, trees, strict=True):
            state.tree = tree
        self._speculation.verification_launched(states)
        took = self._draft.times.target(int(widths.sum()))
        launched = self._clock.now
        if self._setting.exit is not None:
            self._clock.now = launched + self._setting.exit.share * took
            self._expect(self._setting.exit, states, trees, widths)
        self._clock.now = launched + took
        self._fallback.step_took(took)
        if self._setting.policy is not None:
            self._setting.policy.times.observe(len(states), int(widths.sum()), took)
        outcomes = settle(states, trees, [state.settled for state in states], [*map(self._emitted, states)])
        kinds = self._count(outcomes, zip(at_once, found, strict=True), self._clock.now - begun, waited)
        tokens = sum(len(outcome.tokens) for outcome in outcomes)
        self.steps.append(Step(begun, launched, self._clock.now, kinds, tokens))
        return self._commit(outcomes)

    def _best(self, found: Sequence[DraftTree], others: Sequence[list[Part]]) -> list[DraftTree]:
        parts = [[Part(tree), *more] for tree, more in zip(found, others, strict=True)]
        return best_trees(
            parts, [""] * len(parts), self._acceptance.estimate, Budget(self._setting.lookahead)
        )

    def _expect(
        self, exit: EarlyExit, states: Sequence[RequestState], trees: Sequence[DraftTree], widths: np.ndarray
    ) -> None:
        """At a node that left the target's text the exit says what it says at the same place of it, as `PairModel` does."""
        packed = pack(trees, widths)
        places = [self._places(state, parents) for state, (_, parents) in zip(states, packed, strict=True)]
        of = [self._pairs[state.session].exits[exit.layer] for state in states]
        read = likeliest_ends(packed, pack_reached(trees, widths), self._setting.draft_rows)
        said = [[part[at, : exit.choices] for part in pair] for pair, at in zip(of, places, strict=True)]
        tokens, chances = (np.concatenate(parts)[read] for parts in zip(*said, strict=True))
        self._speculation.expected(states, packed, Choices(read, tokens, chances))

    def _places(self, state: RequestState, parents: np.ndarray) -> np.ndarray:
        """The index in the answer of what follows each row. parents: of the rows but the root, as from `pack`."""
        pair, depths = self._pairs[state.session], [0]
        for parent in parents.tolist():
            depths.append(depths[parent + 1] + 1 if parent >= -1 else 0)
        begin = state.text.length - len(pair.prompt)
        return np.minimum(begin + np.array(depths), len(pair) - 1)

    def _chosen(self, trees: Sequence[DraftTree]) -> tuple[list[DraftTree], np.ndarray]:
        """What is verified of the trees, and each request's rows."""
        if self._setting.policy is None:
            return list(trees), np.full(len(trees), 1 + max(map(len, trees)))
        widths = self._setting.policy.choose(trees, [""] * len(trees))
        return [tree.first(width - 1) for tree, width in zip(trees, widths.tolist(), strict=True)], widths

    def _emitted(self, state: RequestState) -> np.ndarray:
        """The target's tokens as far as the tree has them, and one more."""
        pair, parent, emitted = self._pairs[state.session], -1, 0
        tokens = pair.tokens[state.text.length - len(pair.prompt) :]
        nodes = zip(state.tree.parents.tolist(), state.tree.tokens.tolist(), strict=True)
        below = {node: at for at, node in enumerate(nodes)}
        while (child := below.get((parent, int(tokens[emitted])))) is not None:
            parent, emitted = child, emitted + 1
        return tokens[: emitted + 1]

    def _commit(self, outcomes: Sequence[Outcome]) -> list[_Play]:
        for outcome in outcomes:
            state = outcome.request
            state.text.rewrite(state.settled, outcome.tokens)
            state.settled = state.confirmed = state.text.length
            state.tree = EMPTY_TREE
        for told in (*self._feeds, self._fallback):
            told.heard(outcomes)
        self._acceptance.learn(outcomes)
        ended = []
        for state, play in list(self._playing.items()):
            if state.text.length - len(play.pair.prompt) + self._setting.lookahead + 1 > len(play.pair):
                ended.append(play)
                self._end(state)
                self._begin()
        return ended

    def _count(
        self, outcomes: Sequence[Outcome], trees: Iterable, seconds: float, waited: float
    ) -> list[str]:
        """Counts a step; returns each request's kind. trees: of each request what was there at once, and what was there when its step
        began."""
        kinds = []
        for outcome, of_request in zip(outcomes, trees, strict=True):
            drafted = [len(tree) > 0 for tree in (*of_request, outcome.tree)]
            kind = KINDS[drafted.index(True)] if any(drafted) else NOTHING
            kinds.append(kind)
            play = self._playing[outcome.request]
            before, play.before, tally = play.before, kind, play.tally
            if before is not None:
                tally.steps[kind] += 1
                tally.tokens[kind] += len(outcome.tokens)
                tally.after[before, kind] += 1
                tally.seconds += seconds / len(outcomes)
                tally.waiting += waited / len(outcomes)
        return kinds


def _shared(draft: Sequence[tuple[float, float]], target: Sequence[tuple[float, float]]) -> float:
    """The share of the draft's intervals that lies within the target's; both ascend."""
    shared, at = 0.0, 0
    for begin, end in draft:
        while at < len(target) and target[at][1] <= begin:
            at += 1
        for other_begin, other_end in itertools.takewhile(lambda of: of[0] < end, target[at:]):  # noqa: B023
            shared += min(end, other_end) - max(begin, other_begin)
    return shared / max(1e-12, sum(end - begin for begin, end in draft))
