"""What is trained for the demo's targets, on first use: early exits, and an EAGLE-3 head."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from sglang_patches.demo.folder import MODEL_NAME, demo_model_dir, made_once
from sglang_patches.demo.model import ensure
from sglang_patches.demo.noise import own_texts
from sglang_patches.demo.variant import DEEPENED_TIMES, deepened_target
from sglang_patches.early_exit.file import EarlyExits
from sglang_patches.early_exit.fingerprint import model_fingerprint
from sglang_patches.training import HEAD_EPOCHS
from sglang_patches.training.answers import Text
from sglang_patches.training.exits import Run, train
from sglang_patches.training.heads import train_shown

EXITS = "exits.safetensors"
TEXTS, TOKENS = 58, 320  # all of the demo's answers


def _answers() -> list[Text]:
    return [Text(*text) for text in own_texts(TEXTS, TOKENS)]


def demo_exits() -> Path:
    """The file of the demo model's early exits, which are trained on its answers that ship with the package."""

    def make(folder: Path) -> None:
        print("training early exits of the demo model: minutes, once", file=sys.stderr, flush=True)
        train(Run(ensure(), _answers(), folder / EXITS), Console(stderr=True))

    return made_once(demo_model_dir().with_name(f"{MODEL_NAME}-early-exits"), make) / EXITS


def deepened_exits() -> Path:
    """The file of the deepened target's early exits. The target has the demo model's states, each after DEEPENED_TIMES as many layers."""

    def make(folder: Path) -> None:
        demo = EarlyExits.load(demo_exits())
        about = replace(
            demo.about,
            fingerprint=model_fingerprint(deepened_target()),
            layers=demo.about.layers * DEEPENED_TIMES,
            recall={str(int(layer) * DEEPENED_TIMES): recall for layer, recall in demo.about.recall.items()},
        )
        adapters = {layer * DEEPENED_TIMES: adapter for layer, adapter in demo.adapters.items()}
        EarlyExits(about, adapters).save(folder / EXITS)

    return made_once(deepened_target().with_name(f"{deepened_target().name}-early-exits"), make) / EXITS


def demo_head() -> Path:
    """The folder of the demo model's head, which is trained on its answers that ship with the package."""

    def make(folder: Path) -> None:
        print(
            "training an EAGLE-3 head of the demo model: about ten minutes, once", file=sys.stderr, flush=True
        )
        train_shown(ensure(), _answers(), folder, HEAD_EPOCHS, Console(stderr=True))

    return made_once(demo_model_dir().with_name(f"{MODEL_NAME}-eagle3"), make)
