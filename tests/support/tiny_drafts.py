"""Drafts for the model that spells: how often they are right is known, and they start in no time."""

from __future__ import annotations

from pathlib import Path

from sglang_patches.demo.noise import write_noisy_copy
from tests.support.tiny_model import CHARACTERS, write_spelling_model

# Of the noise, by the share of positions of the model's own texts at which both have the same likeliest token.
STRENGTHS = {0.9: 0.085, 0.6: 0.345, 0.3: 0.68}


def spelling_draft(target: Path, folder: Path, agreement: float) -> Path:
    """A draft for the model of `write_spelling_model` in `target`: for agreement 1 that model itself, else a noisy copy of it that
    agrees so often (a key of `STRENGTHS`), saved in the empty folder. Deterministic."""
    if agreement == 1:
        return target
    write_noisy_copy(target, folder, STRENGTHS[agreement])
    return folder


def write_stranger(folder: Path) -> Path:
    """Saves a model with as many tokens as the one that spells, each with another number: no draft for it."""
    return write_spelling_model(folder, CHARACTERS[::-1])
