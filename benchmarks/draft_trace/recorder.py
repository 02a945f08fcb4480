"""Records what the worker does: its look-ups, its end of the channel, its steps and the target's forwards."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.draft_trace import events
from benchmarks.draft_trace.events import Trace, now, plain_tree
from datastore_service.protocol.tree import DraftTree
from sglang_patches.drafting.channel import DraftChannel
from sglang_patches.drafting.fallback import Patience
from sglang_patches.drafting.messages import Answer, Message, Sampling
from sglang_patches.drafting.outcome import Outcome
from sglang_patches.drafting.requests import RequestState
from sglang_patches.drafting.speculation import Speculation


def record_worker() -> None:
    """Of this process, from now on."""
    from sglang_patches.workers import decode

    decode.Speculation = RecordedSpeculation  # type: ignore[misc, assignment]
    decode.DecodeWorker.forward_batch_generation = _timed_step(decode.DecodeWorker.forward_batch_generation)  # type: ignore[method-assign]


@functools.cache
def _trace() -> Trace:
    return Trace("worker")


def timed_forward(forward: Callable, worker: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
    """The target's `forward_batch_generation`."""
    mode, requests = batch.forward_mode, len(batch.reqs)
    width = batch.spec_info.draft_token_num if mode.is_target_verify() else 1
    began = now()
    result = forward(worker, batch, *arguments, **named)
    _trace().write(events.Forward(began, now(), mode.name, requests, width))
    return result


def _timed_step(step: Callable) -> Callable:
    @functools.wraps(step)
    def timed(worker: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
        decodes, began = batch.forward_mode.is_decode(), now()
        result = step(worker, batch, *arguments, **named)
        if decodes:
            _trace().write(events.Step(began, now()))
        return result

    return timed


class RecordedSpeculation:
    """In the place of the worker's `Speculation`, made with the same arguments."""

    def __init__(
        self,
        channel: DraftChannel,
        nodes: int,
        sampling_of: Callable[[RequestState], Sampling],
        *,
        vocabulary: int,
    ) -> None:
        self._trace = _trace()
        self._trace.write(events.Began(now(), nodes, vocabulary))
        self._recorded = Speculation(
            _RecordedChannel(channel, self._trace),
            nodes,
            self._sampling(sampling_of),
            self._clock,
            vocabulary,
        )
        self._keys: dict[RequestState, int] = {}
        self._launched: tuple[Any, list] = (None, [])  # as the worker gave it, and as it was passed on

    @property
    def looked_up(self) -> bool:
        return self._recorded.looked_up

    def seconds_waited(self) -> float:
        return self._recorded.seconds_waited()

    def __getattr__(self, name: str) -> Callable:
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> Any:
        given = [each if callable(each) else list(each) for each in arguments]
        plain = [None if callable(each) else [self._plain(value) for value in each] for each in given]
        self._trace.write(events.Call(now(), name, plain))
        passed = [self._patience(each) if callable(each) else each for each in given]
        if name == "verification_launched":
            self._launched = arguments[0], passed[0]
        elif name == "expected" and arguments[0] is self._launched[0]:
            passed[0] = self._launched[1]  # it is known by being the same list
        result = getattr(self._recorded, name)(*passed)
        if result is not None:
            self._trace.write(events.Returned(now(), [plain_tree(tree) for tree in result]))
        return result

    def _plain(self, value: Any) -> events.Value:
        if isinstance(value, DraftTree):
            return plain_tree(value)
        if isinstance(value, RequestState):
            return self._state(value)
        if isinstance(value, Outcome):
            state, tokens, accepted = self._state(value.request), value.tokens, value.accepted
            return events.Outcome(
                state, value.start, tokens.tobytes(), plain_tree(value.tree), accepted.tobytes()
            )
        if isinstance(value, np.ndarray):
            return events.Array(value.dtype.name, list(value.shape), value.tobytes())
        return int(value)

    def _state(self, state: RequestState) -> events.State:
        values = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        return events.State(
            self._keys.setdefault(state, len(self._keys)),
            state.opening,
            state.text.after(0).tobytes(),
            plain_tree(state.tree),
            {name: of for name, of in values.items() if isinstance(of, str | int | float | bool | None)},
            {name: sorted(of) for name, of in values.items() if isinstance(of, frozenset)},
        )

    def _patience(
        self, ask: Callable[[Sequence[RequestState], Sequence[int]], Patience]
    ) -> Callable[[Sequence[RequestState], Sequence[int]], Patience]:
        def asked(states: Sequence[RequestState], missed: Sequence[int]) -> Patience:
            found = ask(states, missed)
            self._trace.write(events.Patient(found.seconds, found.nodes))
            return found

        return asked

    def _sampling(
        self, sampling_of: Callable[[RequestState], Sampling]
    ) -> Callable[[RequestState], Sampling]:
        def asked(state: RequestState) -> Sampling:
            found = sampling_of(state)
            self._trace.write(events.Sampled(found))
            return found

        return asked

    def _clock(self) -> float:
        seconds = time.monotonic()
        self._trace.write(events.Clock(seconds))
        return seconds


class _RecordedChannel(DraftChannel):
    def __init__(self, channel: DraftChannel, trace: Trace) -> None:
        self._channel, self._trace = channel, trace

    def post(self, messages: Sequence[Message]) -> None:
        if messages:
            self._trace.write(events.Posted(now(), events.framed(messages)))
        self._channel.post(messages)

    def collect(self, seconds: float) -> list[Answer]:
        began = now()
        answers = self._channel.collect(seconds)
        self._trace.write(events.Collected(began, now(), seconds, events.framed(answers)))
        return answers

    def close(self) -> None:
        self._channel.close()
