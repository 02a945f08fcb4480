"""Recorded answers replayed against an engine: what speculative decoding would accept, without a model in the loop.

Greedy decoding's output does not depend on the draft, so a recorded answer decides what any draft gets accepted. A
file is what `python -m benchmarks.record` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datastore_service.engine.engine import Engine
from datastore_service.engine.tree import DraftTree
from datastore_service.engine.types import Budget, Entry, Opening, Rejected
from sglang_patches.workers.requests import accepted_nodes, rejected_siblings


@dataclass(frozen=True)
class Trace:
    """prompt, output: int32 token ids."""

    category: str
    prompt: np.ndarray
    output: np.ndarray


@dataclass(frozen=True)
class Step:
    """A verified draft. accepted: bool [nodes], those on the path of what the model wrote."""

    tree: DraftTree
    accepted: np.ndarray

    @property
    def tokens(self) -> int:
        """Tokens the step yields: the accepted ones and the target's own."""
        return int(self.accepted.sum()) + 1


def load_traces(path: Path) -> list[Trace]:
    """Raises ValueError for a file without the prompts' token ids."""
    traces = []
    with path.open() as file:
        for number, row in enumerate(map(json.loads, file), 1):
            if "prompt_tokens" not in row:
                raise ValueError(f"{path}:{number}: no field prompt_tokens; record the answers anew")
            fields = (np.array(row[name], np.int32) for name in ("prompt_tokens", "tokens"))
            traces.append(Trace(row["category"], *fields))
    return traces


def replay(
    engine: Engine, trace: Trace, budget: Budget, rejected: bool = True, publish: bool = False
) -> Iterator[Step]:
    """A session that drafts for each step of an answer, as SSSD's worker does. The first token comes from the prefill.

    rejected: whether the engine is told what was refused. publish: whether the answer enters the live tier."""
    text = np.concatenate([trace.prompt, trace.output])
    sent, known = 0, len(trace.prompt) + 1
    opening: Opening | None = Opening(publish=publish, prompt_length=len(trace.prompt))
    refused: tuple[Rejected, ...] = ()
    while known < len(text):
        entry = Entry("replay", sent, text[sent:known], refused, budget, opening)
        (reply,) = engine.step([entry])
        accepted = accepted_nodes(reply.tree, text[known:].tolist())
        step = Step(reply.tree, accepted)
        yield step
        refused = rejected_siblings(reply.tree, known, accepted) if rejected else ()
        sent, known, opening = known, min(known + step.tokens, len(text)), None
    engine.step([Entry("replay", sent, text[sent:known], opening=opening, closing=True)])


def by_category(traces: Sequence[Trace]) -> dict[str, list[Trace]]:
    categories: dict[str, list[Trace]] = {}
    for trace in traces:
        categories.setdefault(trace.category, []).append(trace)
    return categories
