"""`python -m benchmarks.draft_trace.replay`: feeds recorded traces through the product's parts again, and counts.

What the draft model said, what the channel brought and when is taken from the trace. Everything else is computed anew, and must come
out as it was: each message to the byte, each look-up's trees.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from prometheus_client import REGISTRY

from benchmarks.draft_trace import events
from benchmarks.draft_trace.events import Event, array, plain_tree, tree_of
from datastore_service.client import Datastore
from sglang_patches.drafting import outcome, verified
from sglang_patches.drafting.channel import DraftChannel
from sglang_patches.drafting.draft import Candidates, Draft
from sglang_patches.drafting.draft_side import DraftParts, DraftSide
from sglang_patches.drafting.fallback import Patience
from sglang_patches.drafting.messages import Answer, Message, Sampling
from sglang_patches.drafting.model import DraftModel, Row
from sglang_patches.drafting.registry import METHODS, DraftSurroundings
from sglang_patches.drafting.requests import RequestState
from sglang_patches.drafting.speculation import Speculation
from sglang_patches.drafting.text import Text
from sglang_patches.options import Options

# Counters of decoding that a replay counts again.
COUNTERS = (
    "specstore_speculation_lookups", "specstore_growth_dropped", "specstore_draft_stale_messages",
    "specstore_draft_guesses", "specstore_verified_nodes", "specstore_accepted_nodes", "specstore_early_exit_tokens",
)  # fmt: skip
LOOKUPS = "specstore_speculation_lookups"

Counts = dict[str, float]  # by counter and label, as NAME{VALUE}
E = TypeVar("E")


class MismatchError(Exception):
    """The replay did otherwise than the server: the trace lacks something, or is of another version."""


@dataclass(frozen=True)
class LookedUp:
    """at: when it began, by the trace's clock. results: hit, waited or miss, of each request that was looked up."""

    at: int
    results: list[str]


def counts(samples: Iterable[Any]) -> Counts:
    """Of the counters above that are not 0. samples: prometheus-client's."""
    found: Counts = {}
    for sample in samples:
        name = sample.name.removesuffix("_total")
        if name in COUNTERS and sample.name.endswith("_total") and sample.value:
            key = f"{name}{{{','.join(sample.labels.values())}}}"
            found[key] = found.get(key, 0.0) + sample.value
    return found


def counted_here() -> Counts:
    return counts(sample for family in REGISTRY.collect() for sample in family.samples)


def since(before: Counts) -> Counts:
    """What was counted here since then."""
    after = {key: value - before.get(key, 0.0) for key, value in counted_here().items()}
    return {key: value for key, value in after.items() if value}


def replayed(folder: Path) -> Counts:
    """Of all traces in the folder. Raises MismatchError."""
    before = counted_here()
    for path in sorted(folder.glob("worker-*.jsonl")):
        replay_worker(events.read(path))
    for path in sorted(folder.glob("draft-*.jsonl")):
        replay_draft(events.read(path))
    return since(before)


# The worker


def replay_worker(recorded: Sequence[Event]) -> list[LookedUp]:
    """Through `Speculation` and its cache."""
    worker = _Worker(recorded)
    while (call := worker.next_call()) is not None:
        worker.run(call)
    return worker.looked_up


class _Worker(DraftChannel):
    """Plays the channel, the clock, the fallback and the requests."""

    def __init__(self, recorded: Sequence[Event]) -> None:
        timed = (events.Forward, events.Step)
        self._events = [event for event in recorded if not isinstance(event, timed)]
        self._at = 0
        self._states: dict[int, RequestState] = {}
        self._unlearned: list[outcome.Outcome] = []
        self._launched: Any = []
        self.looked_up: list[LookedUp] = []
        began = self._take(events.Began)
        self._speculation = Speculation(self, began.nodes, self._sampling_of, self._now, began.vocabulary)

    def next_call(self) -> events.Call | None:
        """None at the end, and before a call that was cut off."""
        return self._take(events.Call) if self._at < len(self._events) else None

    def run(self, call: events.Call) -> None:
        arguments = [
            self._patience if values is None else [self._value(value) for value in values]
            for values in call.arguments
        ]
        if call.name == "outcomes_known":
            self._unlearned += arguments[0]  # type: ignore[arg-type]
        if call.name in ("verification_launched", "close"):  # when the worker counts
            verified.count(self._unlearned)
            self._unlearned = []
        if call.name == "verification_launched":
            self._launched = arguments[0]
        if call.name == "expected":
            arguments[0] = self._launched
        before = counted_here() if call.name == "look_up" else {}
        result = getattr(self._speculation, call.name)(*arguments)
        if result is not None:
            self._compare(call.name, [plain_tree(tree) for tree in result], self._take(events.Returned).trees)
        if call.name == "look_up":
            new = since(before)
            results = [
                kind
                for kind in ("hit", "waited", "miss")
                for _ in range(int(new.get(f"{LOOKUPS}{{{kind}}}", 0)))
            ]
            self.looked_up.append(LookedUp(call.at, results))

    def post(self, messages: Sequence[Message]) -> None:
        if messages:
            self._compare("messages", events.framed(messages), self._take(events.Posted).frame)

    def collect(self, seconds: float) -> list[Answer]:
        event = self._take(events.Collected)
        self._compare("the patience with the channel", seconds, event.patience)
        return events.answers_of(event.frame)

    def close(self) -> None:
        pass

    def _now(self) -> float:
        return self._take(events.Clock).seconds

    def _patience(self, states: Sequence[RequestState], missed: Sequence[int]) -> Patience:
        event = self._take(events.Patient)
        return Patience(event.seconds, event.nodes)

    def _sampling_of(self, state: RequestState) -> Sampling:
        return self._take(events.Sampled).sampling

    def _take(self, kind: type[E]) -> E:
        if self._at == len(self._events):
            raise MismatchError(f"the worker goes on with {kind.__name__} where its trace ends")
        event = self._events[self._at]
        if not isinstance(event, kind):
            raise MismatchError(
                f"event {self._at} of the worker is {type(event).__name__}, the replay expects {kind.__name__}"
            )
        self._at += 1
        return event

    def _compare(self, what: str, here: object, recorded: object) -> None:
        if here != recorded:
            raise MismatchError(
                f"before event {self._at} of the worker: {what} differ from the recorded ones"
            )

    def _value(self, value: events.Value) -> Any:
        if isinstance(value, events.Tree):
            return tree_of(value)
        if isinstance(value, events.State):
            return self._state(value)
        if isinstance(value, events.Outcome):
            return self._outcome(value)
        if isinstance(value, events.Array):
            return np.frombuffer(value.values, value.dtype).reshape(value.shape)
        return value

    def _state(self, plain: events.State) -> RequestState:
        """The same object for the same key, as it is now."""
        text = Text(array(plain.text, np.int32))
        fields = {**plain.fields, **{name: frozenset(of) for name, of in plain.sets.items()}}
        state = self._states.get(plain.key)
        if state is None:
            state = RequestState(req=None, opening=plain.opening, text=text, **fields)  # type: ignore[arg-type]
            self._states[plain.key] = state
        for name, value in (*fields.items(), ("text", text), ("tree", tree_of(plain.tree))):
            setattr(state, name, value)
        return state

    def _outcome(self, plain: events.Outcome) -> outcome.Outcome:
        """Computed from the tree and the emitted tokens."""
        state, tree = self._state(plain.state), tree_of(plain.tree)
        (found,) = outcome.settle([state], [tree], [plain.start], [array(plain.tokens, np.int32)])
        self._compare("accepted nodes", found.accepted.tobytes(), plain.accepted)
        return found


# The draft process


def replay_draft(recorded: Sequence[Event]) -> None:
    """Through `DraftSide` with the predictor and the drafter that the draft process has."""
    if not recorded:
        return
    settled, *rounds = recorded
    assert isinstance(settled, events.Settled)
    model = _RecordedModel()
    side = DraftSide(model, _parts(settled), settled.rows, settled.rows)
    for number, event in enumerate(rounds):
        compare = functools.partial(_compare_draft, number)
        if isinstance(event, events.Heard):
            compare(events.framed(side.hear(events.messages_of(event.frame))), event.answers)
        elif isinstance(event, events.Worked):
            model.begin(event)
            answers = side.work()
            compare((answers is None, events.framed(answers or [])), (event.idle, event.answers))
            model.end()


def _parts(settled: events.Settled) -> DraftParts:
    """As `DraftServer` makes them, for a method that asks no datastore in its draft process."""
    make = METHODS[settled.method].draft_parts
    assert make is not None, settled.method
    return make(
        DraftSurroundings(Options(), settled.lookahead, Options().nodes, open_datastore=_no_datastore)
    )


def _no_datastore() -> Datastore:
    raise MismatchError("the draft side asks a datastore: its answers are not in a trace")


def _compare_draft(number: int, here: object, recorded: object) -> None:
    if here != recorded:
        raise MismatchError(f"the draft side's answers to event {number} differ from the recorded ones")


class _RecordedModel(DraftModel):
    """Says in each round what the model said."""

    def begin(self, worked: events.Worked) -> None:
        self._ready, self._worked = iter(worked.ready), worked
        self._asked = 0

    def end(self) -> None:
        if next(self._ready, None) is not None:
            raise MismatchError("the draft side asked the model for less than it had")

    def ready(self, draft: Draft) -> bool:
        return self._said(next(self._ready, None))

    def prefill(self, drafts: Sequence[Draft]) -> bool:
        return self._said(self._worked.prefilled)[0]

    def forward(self, rows: Sequence[Row]) -> list[Candidates | None]:
        forward = self._said(self._worked.forward)
        if [(row.draft.session, row.node) for row in rows] != forward.rows:
            raise MismatchError("the draft side runs other rows than the recorded ones")
        return [
            each and Candidates(array(each.tokens, np.int32), array(each.probabilities, np.float32))
            for each in forward.candidates
        ]

    @staticmethod
    def _said(event: E | None) -> E:
        if event is None:
            raise MismatchError("the draft side asks the model for what is not recorded")
        return event


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.draft_trace.replay",
        description=(__doc__ or "").split(": ", 1)[1].splitlines()[0],
    )
    parser.add_argument("folder", type=Path, help="of the traces of one server")
    try:
        for key, value in sorted(replayed(parser.parse_args(argv).folder).items()):
            print(f"{key} {value:g}")
    except MismatchError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
