"""Has an early exit of the target look into a step, for the draft side (MIRROR)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from sglang.srt.arg_groups.overrides import resolved_view

from datastore_service.protocol.tree import DraftTree
from sglang_patches.drafting.speculation import Choices
from sglang_patches.early_exit.file import EarlyExits
from sglang_patches.early_exit.fingerprint import model_fingerprint, model_folder
from sglang_patches.early_exit.graph_tap import GraphTap
from sglang_patches.early_exit.tap import Draws, HostTap, Tap
from sglang_patches.ledger.requests import RequestState
from sglang_patches.methods.mirror import MOST, choices_of
from sglang_patches.options import Options
from sglang_patches.verification.layout import TreeLayout, likeliest_ends, pack_reached

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

Told = Callable[[Sequence[RequestState], np.ndarray, Choices], None]


class ExitReader:
    """Reads the nodes at which a step most likely ends.

    rows: most of a step. seed_of: of the noise that a request's draws share with its drafts.
    """

    def __init__(self, tap: Tap, rows: int, seed_of: Callable[[Req], int | None]) -> None:
        self._tap, self._rows, self._seed_of = tap, rows, seed_of

    def nodes_of(self, packed: np.ndarray, trees: Sequence[DraftTree], widths: np.ndarray) -> np.ndarray:
        """int64, which nodes of the step are read.

        widths: rows of each request.
        """
        return likeliest_ends(packed, pack_reached(trees, widths), self._rows)

    def read(
        self,
        states: Sequence[RequestState],
        packed: np.ndarray,
        nodes: np.ndarray,
        layout: TreeLayout,
        told: Told,
    ) -> None:
        """Reads these nodes in the forward that is launched next.

        packed: the step's trees, as from `layout.pack`.
        layout: of the step.
        told: gets what the exit expects.
        """
        requests = [(state.req.sampling_params.temperature, self._seed_of(state.req)) for state in states]

        def expected(tokens: np.ndarray, probabilities: np.ndarray) -> None:
            told(states, packed, Choices(nodes, tokens, probabilities))

        draws = Draws.of_batch(requests, layout.positions, nodes)
        if not layout.uniform:
            draws = draws._replace(rows=layout.rows_of_nodes.ravel()[nodes])
        self._tap.expect(draws, choices_of(len(states)), expected)


def make_tap(options: Options, runner: ModelRunner, server_args: ServerArgs) -> Tap:
    """Makes the tap of the server's early exit from the file that the operator named. Raises ValueError that names the option for a file of
    another model or a model that has no place for it, OSError for a file that cannot be read."""
    view = resolved_view(server_args)
    try:
        exits = EarlyExits.load(Path(options.early_exit))
        _refuse_other_model(exits, view.model_path, view.revision)
        layer = exits.layer(options.early_exit_layer)
    except ValueError as error:
        raise ValueError(f"specstore option early_exit: {options.early_exit}: {error}") from error
    first, among_8 = exits.about.recall[str(layer)]
    logger.info(
        "specstore: early exit after %d of %d layers; in training it expected %.0f%% of the tokens, %.0f%% among its first 8",
        layer, exits.about.layers, 100 * first, 100 * among_8,
    )  # fmt: skip
    if runner.device == "cpu":
        return HostTap(runner, exits.adapters[layer], layer)
    return GraphTap(runner, exits.adapters[layer], layer, options.draft_rows, MOST)


def _refuse_other_model(exits: EarlyExits, model: str, revision: str | None) -> None:
    found = model_fingerprint(model_folder(model, revision))
    if found != exits.about.fingerprint:
        raise ValueError(f"is of the model with fingerprint {exits.about.fingerprint}, {model} has {found}")
