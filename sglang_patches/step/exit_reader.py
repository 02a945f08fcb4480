"""Has an early exit of the target look into a step, for the draft side (MIRROR)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from sglang.srt.arg_groups.overrides import resolved_view

from datastore_service.protocol.tree import DraftTree
from sglang_patches.drafting.speculation import Choices
from sglang_patches.early_exit.loading import make_tap
from sglang_patches.early_exit.tap import Draws, Tap
from sglang_patches.ledger.requests import RequestState
from sglang_patches.methods.mirror import MOST, choices_of
from sglang_patches.options import Options
from sglang_patches.verification.layout import likeliest_ends, pack_reached

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

Told = Callable[[Sequence[RequestState], np.ndarray, Choices], None]


class ExitReader:
    """Reads the rows at which a step most likely ends.

    rows: most of a step. seed_of: of the noise that a request's draws share with its drafts.
    """

    def __init__(self, tap: Tap, rows: int, seed_of: Callable[[Req], int | None]) -> None:
        self._tap, self._rows, self._seed_of = tap, rows, seed_of

    def rows_of(self, packed: np.ndarray, trees: Sequence[DraftTree]) -> np.ndarray:
        """int64, which rows of the step are read."""
        return likeliest_ends(packed, pack_reached(trees, packed.shape[2] + 1), self._rows)

    def read(
        self,
        states: Sequence[RequestState],
        packed: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        told: Told,
    ) -> None:
        """Reads these rows in the forward that is launched next. packed: the step's trees, as from `layout.pack`. told: gets what the exit
        expects."""
        requests = [(state.req.sampling_params.temperature, self._seed_of(state.req)) for state in states]

        def expected(tokens: np.ndarray, probabilities: np.ndarray) -> None:
            told(states, packed, Choices(rows, tokens, probabilities))

        self._tap.expect(Draws.of_batch(requests, positions, rows), choices_of(len(states)), expected)


def make_server_tap(options: Options, runner: ModelRunner, server_args: ServerArgs) -> Tap:
    """The exit that the operator named, in this server's model."""
    view = resolved_view(server_args)
    return make_tap(options, runner, options.draft_rows, MOST, view.model_path, view.revision)
