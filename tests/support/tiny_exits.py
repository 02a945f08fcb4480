"""Early exits that are trained in a moment: of the tiny models, and poor ones of the demo model."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from sglang_patches.demo.noise import own_texts
from sglang_patches.training.answers import Text
from sglang_patches.training.exits import Run, train
from tests.support.tiny_model import texts_of

BEGUN = 4  # tokens of a text that are its prompt


def train_poor_exits(demo_model: Path, out: Path) -> Path:
    """From so few answers that they are seldom right."""
    texts = [Text(*text) for text in own_texts(3, 24)]
    train(Run(demo_model, texts, out, epochs=1), Console(file=io.StringIO()))
    return out


def train_tiny_exits(model: Path, out: Path) -> Path:
    """Of the model in the folder, from what it says of its own accord."""
    texts = [Text(text[:BEGUN], text[BEGUN:]) for text in texts_of(model, 20, 64)]
    train(Run(model, texts, out), Console(file=io.StringIO()))
    return out
