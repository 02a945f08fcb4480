"""Files that a check makes of the model for itself: an early exit, and a target to time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from sglang_patches.demo.variant import CONFIG, WEIGHTS, WIDENED_TIMES, write_widened
from sglang_patches.early_exit.fingerprint import model_fingerprint

SMALL_BYTES = 2 << 30  # of the weights: on a GPU a step of such a model is mostly the host's work


def early_exit(target: Path, file: Path) -> Path:
    """An untrained early exit of the target in the middle, made where the file is not there. No emitted token depends on what an
    exit expects, and what it costs does not either."""
    from transformers import AutoConfig

    from sglang_patches.early_exit.file import About, Adapter, EarlyExits

    if not file.exists():
        import torch

        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(target).get_text_config()
        layers, hidden = config.num_hidden_layers, config.hidden_size
        middle = layers // 2
        about = About(model_fingerprint(target), layers, hidden, {str(middle): (0.0, 0.0)})
        EarlyExits(about, {middle: Adapter(hidden)}).save(file)
    return file


def timed_target(model: Path, device: str, folder: Path) -> Path:
    """What tokens a second are measured with. On a CPU the model itself. On an accelerator a small Llama is no target to measure with:
    it is widened (`demo.variant`) into `folder`, where that is not there yet."""
    if device == "cpu" or not _is_small_llama(model):
        return model
    if not folder.exists():
        new = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        write_widened(model, new, WIDENED_TIMES)
        new.rename(folder)
    return folder


def _is_small_llama(model: Path) -> bool:
    weights = model / WEIGHTS
    kind = json.loads((model / CONFIG).read_text()).get("model_type")
    return kind == "llama" and weights.exists() and weights.stat().st_size < SMALL_BYTES
