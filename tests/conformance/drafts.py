"""The drafts of the suite: a draft model that is the target itself, noisy copies of it, and a process that lies."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sglang_patches.draft_process.model import choose
from sglang_patches.draft_side.draft import Candidates
from sglang_patches.draft_side.seams import DraftModel, Row
from sglang_patches.draft_side.side import DraftParts
from sglang_patches.drafting.channel import Backoff, ProcessChannel
from sglang_patches.drafting.seams import DraftChannel
from tests.conftest import DRAFTS
from tests.support.draft_side import FunctionModel, InProcessDraftSide, follow_pairs, text_of

*_COPIES, LYING = DRAFTS
AGREEMENTS = {name: float(name) for name in _COPIES}  # with the target's likeliest token
SEED = 1

ROOT = Path(__file__).parents[2]
Logits = Callable[[Sequence[int]], torch.Tensor]  # text -> float32 [vocabulary]


def start_liar(
    vocabulary: int,
    parts: Callable[[], DraftParts] | None = None,
    backoff: Backoff = Backoff(0.2, 0.2, 60.0),  # noqa: B008 - a constant
) -> ProcessChannel:
    """Whatever it is told, it says what is not so. vocabulary: number of the target's token ids. parts: of a draft side that does not
    lie, not used."""
    program = [sys.executable, "-m", "tests.support.draft_programs", LYING, str(vocabulary), str(SEED)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    log = Path(tempfile.mkdtemp(prefix="specstore-liar-")) / "log"
    return ProcessChannel(program, {"PYTHONPATH": path}, log, backoff)


class DrawingModel(FunctionModel):
    """Draws with the target's noise, as the draft process does."""

    def __init__(self, logits: Logits) -> None:
        super().__init__(lambda texts: torch.stack([logits(text) for text in texts]).numpy())

    def forward(self, rows: Sequence[Row]) -> list[Candidates | None]:
        texts = [text_of(*row) for row in rows]
        logits = torch.from_numpy(self.function(texts))
        return choose(logits, [row.draft.sampling for row in rows], [len(text) for text in texts])


class DrawingDraftSide(InProcessDraftSide):
    """A draft side of this process with a draft model of known quality. It can be killed: what it is told then is lost, and when it
    rises it knows nothing."""

    def __init__(self, logits: Logits, parts: Callable[[], DraftParts]) -> None:
        self._logits, self._dead = logits, False
        super().__init__(follow_pairs, parts=parts)

    def new_model(self) -> DraftModel:
        return DrawingModel(self._logits)

    def kill(self) -> None:
        self._dead = True

    def rise(self) -> None:
        self._dead = False
        self.forget()

    def post(self, messages: Sequence) -> None:
        if not self._dead:
            super().post(messages)

    def collect(self, seconds: float) -> list:
        return [] if self._dead else super().collect(seconds)


class Copy:
    """A copy of a model of texts that agrees with it so often: at the other texts it takes each token for its neighbour."""

    def __init__(self, logits: Logits, agreement: float) -> None:
        self._logits, self._agreement = logits, agreement

    def __call__(self, text: Sequence[int]) -> torch.Tensor:
        found = self._logits(text)
        place = torch.Generator().manual_seed(hash(tuple(text[-2:])))
        agrees = float(torch.rand(1, generator=place)) < self._agreement
        return found if agrees else found.roll(1)


def draft_side(name: str, logits: Logits, vocabulary: int, parts: Callable[[], DraftParts]) -> DraftChannel:
    """name: of `AGREEMENTS`, or `LYING`. logits: the target's."""
    if name == LYING:
        return start_liar(vocabulary)
    return DrawingDraftSide(Copy(logits, AGREEMENTS[name]), parts)
