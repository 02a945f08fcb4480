"""What a server's parts take, by its own metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from benchmarks.beside.servers import BESIDE
from benchmarks.serve.measure import Counters
from benchmarks.serve.prediction import StepTime, rising
from tests.support.servers.engine import SglangServer
from tests.support.servers.metrics import samples

FORWARDS, ROWS = "specstore_draft_forward_seconds", "specstore_draft_rows_total"
PREFILLS, PREFILLED = "specstore_draft_prefill_seconds_sum", "specstore_draft_prefilled_tokens_total"
ROUNDS = "specstore_draft_round_seconds"
LOOKUPS = "specstore_speculation_lookups_total"
COUNTED = ("forwards", "seconds", "rows", "prefill", "rounds", "lookups")

Draft = dict[str, dict[str, float]]


def draft_counters(server: SglangServer) -> Draft:
    """Of a server with a draft process, since it runs. `forwards`, `seconds`, `rows` by rows of the forward, rounded up to a power of two;
    `prefill`: seconds and tokens; `rounds`: seconds and count; `lookups` by result."""
    found: Draft = defaultdict(lambda: defaultdict(float))
    for sample in samples(server.url):
        rows = sample.labels.get("rows", "")
        where = {
            f"{FORWARDS}_count": ("forwards", rows), f"{FORWARDS}_sum": ("seconds", rows), ROWS: ("rows", rows),
            PREFILLS: ("prefill", "seconds"), PREFILLED: ("prefill", "tokens"),
            f"{ROUNDS}_sum": ("rounds", "seconds"), f"{ROUNDS}_count": ("rounds", "count"),
            LOOKUPS: ("lookups", sample.labels.get("result", "")),
        }.get(sample.name)  # fmt: skip
        if where is not None:
            found[where[0]][where[1]] += sample.value
    return {name: dict(found[name]) for name in COUNTED}


def since(before: Mapping[str, Mapping[str, float]], after: Draft) -> Draft:
    return {
        name: {key: value - before.get(name, {}).get(key, 0.0) for key, value in values.items()}
        for name, values in after.items()
    }


class Watch:
    """What one load adds to a server's counters."""

    def __init__(self, variant: str, server: SglangServer) -> None:
        self._server, self._drafts = server, variant in BESIDE
        self._counters = Counters.of(server) if variant in ("sssd", *BESIDE) else None
        self._draft = draft_counters(server) if self._drafts else None

    def added(self) -> dict:
        """cells: as of benchmarks.serve.measure. draft: as of `draft_counters`."""
        record: dict = {}
        if self._counters is not None:
            spent = Counters.of(self._server).since(self._counters)
            record |= {
                "phases": spent.phases,
                "cells": [[*cell, *times] for cell, times in spent.cells.items()],
            }
        if self._draft is not None:
            record["draft"] = since(self._draft, draft_counters(self._server))
        return record


@dataclass
class DraftTimes:
    """Of a draft process, from all loads so far."""

    totals: Draft = field(default_factory=dict)

    def learn(self, added: Draft) -> None:
        for name, values in added.items():
            mine = self.totals.setdefault(name, {})
            for key, value in values.items():
                mine[key] = mine.get(key, 0.0) + value

    def forward(self, rows: int) -> float:
        """Seconds of a forward over so many rows."""
        return StepTime(*zip(*self.points(), strict=True))(rows, 0.0)

    def points(self) -> list[tuple[float, float]]:
        """Mean rows and mean seconds of the forwards of each size; more rows never take less."""
        forwards, seconds, rows = (self.totals[name] for name in ("forwards", "seconds", "rows"))
        sizes = sorted((size for size, count in forwards.items() if count), key=int)
        found = rising({int(size): np.array([forwards[size], seconds[size]]) for size in sizes})
        return [(rows[size] / forwards[size], took) for size, took in zip(sizes, found.seconds, strict=True)]

    def prefill(self, tokens: int) -> float:
        """Seconds of a prompt of so many tokens."""
        spent = self.totals["prefill"]
        return tokens * spent["seconds"] / spent["tokens"] if spent.get("tokens") else 0.0

    @property
    def around_forward(self) -> float:
        """Seconds of a round but for what the model takes: messages, guesses, look-ups."""
        rounds = self.totals["rounds"]
        model = sum(self.totals["seconds"].values()) + self.totals["prefill"].get("seconds", 0.0)
        return max(0.0, rounds["seconds"] - model) / rounds["count"] if rounds.get("count") else 0.0


class TargetTimes:
    """Of a step of one batch size by rows of each request, from SSSD's steps so far. Of the server's steps, hence with its host's time."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], np.ndarray] = defaultdict(lambda: np.zeros(2))

    def learn(self, cells: list) -> None:
        for batch, width, count, seconds in cells:
            self._cells[batch, width] += (count, seconds)

    def of(self, batch: int) -> StepTime:
        """Raises ValueError where no step of this size was measured."""
        known = {width: times for (size, width), times in self._cells.items() if size == batch}
        if not known:
            raise ValueError(f"no step of batch {batch} was measured")
        return rising(known)
