"""Calls of the batch kernel: their arguments, their working memory and their counters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from datastore_service.engine.batch import (
    COUNTERS,
    COUNTERS_ROW,
    DRAFTED,
    OUTPUT,
    REQUEST_FIELDS,
    SCRATCH_ROWS,
    TIERS,
    run_batch,
)
from datastore_service.engine.fusion import COLUMNS, REAL_ROWS
from datastore_service.engine.retrieval import SOURCE_FIELDS
from datastore_service.engine.session import SessionIndex
from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import Budget

_NO_SOURCES = np.empty((0, SOURCE_FIELDS), np.int64)


@dataclass(frozen=True, slots=True)
class Counts:
    """The drafts of all kernel calls, and each Tier's part in them.

    drafts: trees asked for.
    hits: by Tier, drafts with a node of it.
    drafted: by Tier, its nodes.
    accepted: by Tier, those of its nodes that came true."""

    drafts: int
    hits: list[int]
    drafted: list[int]
    accepted: list[int]


class KernelCall:
    """Makes one kernel call at a time. It has working memory of 2 MB, of which a call uses a few KB.

    Use: `begin`, then for each entry and after that for each query `search`, unless it searches what the one before it did, and `add`
    or `add_nothing`; then `run`."""

    __slots__ = ("_fields", "_integers", "_output", "_ranges", "_reals", "_searched", "_tables")

    def __init__(self) -> None:
        self._integers = np.zeros((SCRATCH_ROWS, COLUMNS), dtype=np.int64)
        self._reals = np.zeros((REAL_ROWS, COLUMNS), dtype=np.float64)

    def begin(self) -> None:
        self._fields: list[int] = []  # of all requests
        self._output = 0
        self._tables: list[np.ndarray] = []
        # By a table's id, the range of its rows among those of all tables.
        self._ranges: dict[int, tuple[int, int]] = {}

    def search(self, table: np.ndarray) -> None:
        """What is added from now on searches the texts of this `source_table`. The caller keeps the texts alive during the call."""
        if id(table) not in self._ranges:
            rows = sum(map(len, self._tables))
            self._ranges[id(table)] = rows, rows + len(table)
            self._tables.append(table)
        self._searched = self._ranges[id(table)]

    def add_nothing(self) -> None:
        """Adds an entry that neither appends nor drafts, or a query that is not answered."""
        self._fields += (0, 0, 0, 0, 0, 0, 0, 0, 0, self._output, 0)

    def add(self, index: SessionIndex, begin: int, end: int, budget: Budget) -> None:
        """Adds an entry or query with the range [begin, end) of the tokens that `run` gets. index: has reserved room for
        them and for the budget's nodes."""
        nodes = budget.nodes
        self._fields += (
            index.address, begin, end, index.text_start, nodes, budget.depth, budget.children, *self._searched,
            self._output, 0,
        )  # fmt: skip
        self._output += nodes

    def run(self, entries: int, appended: np.ndarray, weights: np.ndarray) -> list[DraftTree]:
        """A tree for each entry and query. entries: how many were added before the first query. appended: int32, the tokens
        of all. weights: of `FusionWeights.packed`."""
        requests = np.array(self._fields, dtype=np.int64).reshape(-1, REQUEST_FIELDS)
        tokens = np.empty(self._output, dtype=np.int32)
        parents = np.empty(self._output, dtype=np.int32)
        probs = np.empty(self._output, dtype=np.float32)
        tiers = np.empty(self._output, dtype=np.uint8)
        # A copy, because rows of the session are overwritten.
        sources = np.concatenate([_NO_SOURCES, *self._tables])
        run_batch(
            requests, entries, appended, sources, weights, self._integers, self._reals, tokens, parents, probs, tiers
        )  # fmt: skip
        return [
            DraftTree(tokens[i:j], parents[i:j], probs[i:j], tiers[i:j]) if j > i else EMPTY_TREE
            for i, j in requests[:, OUTPUT : DRAFTED + 1].tolist()
        ]

    @property
    def counters(self) -> np.ndarray:
        """int64 [COUNTERS], a view: drafts, then hits, drafted and accepted for each tier."""
        return self._integers[COUNTERS_ROW, :COUNTERS]


class KernelCallPool:
    """Holds as many `KernelCall`s as have been in use at the same time. Thread-safe."""

    def __init__(self) -> None:
        self._all: list[KernelCall] = []
        self._idle: list[KernelCall] = []

    def take(self) -> KernelCall:
        try:
            return self._idle.pop()
        except IndexError:
            self._all.append(KernelCall())
            return self._all[-1]

    def give_back(self, call: KernelCall) -> None:
        self._idle.append(call)

    def counts(self) -> Counts:
        """The counts of all calls so far."""
        total = np.zeros(COUNTERS, dtype=np.int64)
        for call in list(self._all):
            total += call.counters
        hits, drafted, accepted = total[1:].reshape(3, TIERS).tolist()
        return Counts(int(total[0]), hits, drafted, accepted)
