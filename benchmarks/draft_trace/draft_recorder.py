"""Records what the draft process does: what it hears, each round of its work, and what its model says."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.draft_trace import SERIAL_VARIABLE, events
from benchmarks.draft_trace.events import Trace, now
from sglang_patches.drafting import draft_side
from sglang_patches.drafting.draft import Candidates, Draft
from sglang_patches.drafting.draft_side import DraftSide
from sglang_patches.drafting.messages import Answer, Closed, Committed, Message
from sglang_patches.drafting.model import DraftModel, Row
from sglang_patches.drafting.process.settings import DraftSettings


def record_draft_side() -> None:
    """Of this process. To be called before it imports `process.server`, which takes the class from its module."""
    draft_side.DraftSide = RecordedSide  # type: ignore[misc]


class RecordedSide(DraftSide):
    def __init__(self, model: DraftModel, *rest: Any) -> None:
        settings = DraftSettings.parse(argparse.ArgumentParser())
        self._trace = Trace("draft")
        self._trace.write(events.Settled(now(), settings.rows, settings.lookahead, settings.method))
        self._told = ToldLate() if SERIAL_VARIABLE in os.environ else None
        self._recorded = RecordedModel(model)
        super().__init__(self._recorded, *rest)  # type: ignore[arg-type]

    def hear(self, messages: Iterable[Message]) -> list[Answer]:
        heard = list(messages) if self._told is None else self._told.pass_on(messages)
        at = now()
        answers = super().hear(heard)
        if heard:
            self._trace.write(events.Heard(at, events.framed(heard), events.framed(answers)))
        return answers

    def work(self) -> list[Answer] | None:
        began = now()
        self._recorded.begin()
        answers = super().work()
        did = self._recorded
        self._trace.write(
            events.Worked(
                began, now(), did.said, did.forwarded, did.prefilled, answers is None, events.framed(answers or [])
            )
        )  # fmt: skip
        return answers


class ToldLate:
    """Holds back what a session's messages say until one says the outcome of its verification, or that the session ends."""

    def __init__(self) -> None:
        self._held: dict[str, list[Message]] = {}

    def pass_on(self, messages: Iterable[Message]) -> list[Message]:
        passed: list[Message] = []
        for message in messages:
            self._held.setdefault(message.session, []).append(message)
            if isinstance(message, Committed | Closed):
                passed += self._held.pop(message.session)
        return passed


class RecordedModel:
    """A draft model that remembers what it said in a round."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self.begin()

    def begin(self) -> None:
        self.said: list[bool] = []
        self.forwarded: events.DraftForward | None = None
        self.prefilled: tuple[bool, int, int] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def ready(self, draft: Draft) -> bool:
        self.said.append(self._model.ready(draft))
        return self.said[-1]

    def prefill(self, drafts: Sequence[Draft]) -> bool:
        began = now()
        done = self._model.prefill(drafts)
        self.prefilled = done, began, now()
        return done

    def forward(self, rows: Sequence[Row]) -> list[Candidates | None]:
        began = now()
        found = self._model.forward(rows)
        asked = [(row.draft.session, row.node) for row in rows]
        plain = [
            each and events.Candidates(each.tokens.tobytes(), each.probabilities.tobytes()) for each in found
        ]
        self.forwarded = events.DraftForward(began, now(), asked, plain)
        return found
