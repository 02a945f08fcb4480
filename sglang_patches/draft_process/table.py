"""What a draft forward changes of the runner's table of KV slots. A row of it holds the slots of a sequence's tokens, in their order.

The table is on the device. The host knows all slots and reads nothing back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

SCRATCH = 1  # the first scratch row; row 0 is SGLang's, for the padding of captured graphs


class Piece(NamedTuple):
    """Slots to be written into a row, from a column on. slots: int32."""

    row: int
    column: int
    slots: np.ndarray


class TableChange(NamedTuple):
    """What one draft forward changes of the table.

    sources: int64, for each scratch row in use the row that it begins as.
    columns: number of columns that are copied from that row, 0 for none.
    cells: int64, places in the flat table that are written then.
    slots: int32, what is written there.
    """

    sources: np.ndarray
    columns: int
    cells: np.ndarray
    slots: np.ndarray

    @classmethod
    def of(
        cls, sources: Sequence[int], columns: int, pieces: Sequence[Piece], row_length: int
    ) -> TableChange:
        """Nothing is copied where `columns` is 0."""
        cells = [np.arange(len(slots)) + (row * row_length + column) for row, column, slots in pieces]
        return cls(
            np.array(sources, np.int64),
            columns,
            np.concatenate([np.empty(0, np.int64), *cells]),
            np.concatenate([np.empty(0, np.int32), *(piece.slots for piece in pieces)]),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """What `apply` needs on the device."""
        return {"table_sources": self.sources, "table_cells": self.cells, "table_slots": self.slots}

    def apply(self, table: torch.Tensor, arrays: Mapping[str, torch.Tensor]) -> None:
        """Writes the table: three kernels at most, none of which the host waits for."""
        if self.columns:
            copied = table[:, : self.columns].index_select(0, arrays["table_sources"])
            table[SCRATCH : SCRATCH + len(copied), : self.columns] = copied
        if len(self.cells):
            table.view(-1).index_copy_(0, arrays["table_cells"], arrays["table_slots"])
