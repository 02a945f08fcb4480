"""The EAGLE-3 head of the demo model, made on first use."""

from __future__ import annotations

import sys
from pathlib import Path

from sglang_patches.demo.folder import MODEL_NAME, demo_model_dir, made_once
from sglang_patches.demo.model import ensure
from sglang_patches.demo.noise import own_texts
from sglang_patches.early_exit.states import Text
from sglang_patches.head.training import train_shown
from sglang_patches.launch.early_exits import TEXTS, TOKENS


def demo_head() -> Path:
    """The folder of the demo model's head, which is trained on its answers that ship with the package."""

    def make(folder: Path) -> None:
        print("training an EAGLE-3 head of the demo model: ten minutes, once", file=sys.stderr, flush=True)
        train_shown(ensure(), [Text(*text) for text in own_texts(TEXTS, TOKENS)], folder)

    return made_once(demo_model_dir().with_name(f"{MODEL_NAME}-eagle3"), make)
