"""EAGLE-3 heads of the tiny models, trained in seconds."""

from __future__ import annotations

from pathlib import Path

from sglang_patches.training.answers import Text
from sglang_patches.training.heads import train_head
from tests.support.tiny_model import texts_of

BEGUN = 4  # tokens of a text that are its prompt


def train_tiny_head(model: Path, out: Path) -> Path:
    """A head of the model in the folder, trained on what that says of its own accord."""
    texts = [Text(text[:BEGUN], text[BEGUN:]) for text in texts_of(model, 32, 64)]
    train_head(model, texts, out, epochs=8, told=lambda step: None)
    return out
