"""A draft side for recorded sessions, in the worker's process: a real one, but for its model, whose answers are made of the recorded texts,
and for the clock that worker and draft side measure with."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from sglang_patches.draft_side.draft import Candidates
from sglang_patches.draft_side.seams import DraftModel, Row
from sglang_patches.draft_side.side import DraftParts
from sglang_patches.exchange.messages import Answer, Message
from sglang_patches.exchange.wire import frame_of
from tests.support.draft_side import InProcessDraftSide, text_of

SECONDS = 0.001  # that pass between two looks at the clock
RIGHT = 7  # of ten tokens


class Clock:
    """Seconds that pass when somebody looks: the same in every run."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += SECONDS
        return self._now


class RecordedModel(DraftModel):
    """A draft model that is right about most tokens of the recorded texts, and whose second choice is right about the others. texts: of
    each running request, by session."""

    def __init__(self, texts: Callable[[str], list[int]]) -> None:
        self._texts = texts

    def forward(self, rows: Sequence[Row]) -> list[Candidates | None]:
        return [self._candidates(row) for row in rows]

    def _candidates(self, row: Row) -> Candidates:
        recorded, text = self._texts(row.draft.session), text_of(*row)
        position = len(text)
        foreseen = position < len(recorded) and text == recorded[:position]
        right = recorded[position] if foreseen else text[-1]
        other = recorded[position // 2 % len(recorded)]
        choices = [right, other if other != right else other + 1]
        if position * 2654435761 % 2**32 % 10 >= RIGHT:
            choices.reverse()
        return Candidates(np.array(choices, np.int32), np.array([0.7, 0.2], np.float32))


class RecordingDraftSide(InProcessDraftSide):
    """Notes what is said to it and what it answers, as the bytes that would go to a draft process and come back."""

    def __init__(self, texts: Callable[[str], list[int]], parts: Callable[[], DraftParts]) -> None:
        self.new_model = functools.partial(RecordedModel, texts)  # type: ignore[method-assign]
        self.said: list[str] = []
        super().__init__(lambda _: np.empty(0), rounds=2, parts=parts)

    def post(self, messages: Sequence[Message]) -> None:
        super().post(messages)
        self._note("told", messages)

    def collect(self, seconds: float) -> list[Answer]:
        answers = super().collect(seconds)
        self._note("answered", answers)
        return answers

    def _note(self, what: str, messages: Sequence[Message | Answer]) -> None:
        if messages:
            self.said.append(f"{what} {hashlib.sha256(frame_of(messages)).hexdigest()[:16]}")
