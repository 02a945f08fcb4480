"""Makes the early exit of a server from its file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_patches.early_exit.file import EarlyExits, model_fingerprint, model_folder
from sglang_patches.early_exit.graph_tap import GraphTap
from sglang_patches.early_exit.tap import HostTap, Tap

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_patches.options import Options

logger = logging.getLogger(__name__)


def make_tap(
    options: Options, runner: ModelRunner, rows: int, choices: int, model: str, revision: str | None
) -> Tap:
    """Makes the tap of a server's early exit from its file. Raises ValueError that names the option for a file of another model or a
    model that has no place for it, OSError for a file that cannot be read.

    rows: most that are read of a verification.
    choices: most of a row.
    model, revision: as SGLang's --model-path and --revision.
    """
    try:
        exits = EarlyExits.load(Path(options.early_exit))
        _refuse_other_model(exits, model, revision)
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
    return GraphTap(runner, exits.adapters[layer], layer, rows, choices)


def _refuse_other_model(exits: EarlyExits, model: str, revision: str | None) -> None:
    found = model_fingerprint(model_folder(model, revision))
    if found != exits.about.fingerprint:
        raise ValueError(f"is of the model with fingerprint {exits.about.fingerprint}, {model} has {found}")
