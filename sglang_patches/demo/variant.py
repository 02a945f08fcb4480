"""Targets made from another model's weights, which cost more and say the same.

`deepened`: what a draft model can be faster than. Behind each block come copies of it whose attention and MLP write zeros. They compute
as much as the block, and add nothing.

`widened` (`python -m sglang_patches.demo.variant OUT`): costs what a model of billions of weights costs. On a GPU the demo model is no
target to measure with: its forward takes less than the host's work for a step. Each MLP gets further hidden units whose outputs are
multiplied by zero. They are read and computed in every step, and add nothing.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from sglang_patches.demo.folder import MODEL_NAME, demo_model_dir, made_once
from sglang_patches.demo.model import ensure

WEIGHTS, CONFIG = "model.safetensors", "config.json"
DEEPENED_TIMES = 4
WIDENED_TIMES = 85  # with the demo model 6.8 billion weights
# What a block adds to the residual stream leaves these.
OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")


def write_variant(source: Path, out: Path, change: Callable[[dict, dict], None]) -> None:
    """Writes into the empty folder `out` the model of `source`, whose weights are one file. change: changes the state dictionary
    and the configuration in place."""
    from safetensors.torch import load_file, save_file

    weights, config = load_file(source / WEIGHTS), json.loads((source / CONFIG).read_text())
    change(weights, config)
    for file in source.iterdir():
        if file.name not in (WEIGHTS, CONFIG):
            shutil.copyfile(file, out / file.name)
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, out / WEIGHTS, {"format": "pt"})


def deepened_target(times: int = DEEPENED_TIMES) -> Path:
    """The demo model with `times` its blocks, made on first use."""
    out = demo_model_dir().with_name(f"{MODEL_NAME}-deepened-{times}")
    return made_once(out, lambda folder: write_deepened(ensure(), folder, times))


def write_deepened(source: Path, out: Path, times: int) -> None:
    """Writes into the empty folder `out` the Llama of `source` with `times` its blocks, block i in the place of i * times."""
    write_variant(source, out, lambda weights, config: _deepen(weights, config, times))


def _deepen(weights: dict, config: dict, times: int) -> None:
    import torch

    config["num_hidden_layers"] *= times
    blocks = {name: found for name in weights if (found := _BLOCK.fullmatch(name))}
    tensors = {name: weights.pop(name) for name in blocks}
    for name, tensor in tensors.items():
        first, part = int(blocks[name][1]) * times, blocks[name][2]
        weights[f"model.layers.{first}.{part}"] = tensor
        for copy in range(first + 1, first + times):
            silent = torch.zeros_like(tensor) if part in OUTPUTS else tensor.clone()
            weights[f"model.layers.{copy}.{part}"] = silent


def write_widened(source: Path, out: Path, times: int) -> None:
    """Writes into the empty folder `out` the Llama of `source` with `times` its hidden units in each MLP."""
    write_variant(source, out, lambda weights, config: _widen(weights, config, times))


def _widen(weights: dict, config: dict, times: int) -> None:
    import torch

    config["intermediate_size"] *= times
    for name, tensor in weights.items():
        if name.endswith(("mlp.gate_proj.weight", "mlp.up_proj.weight")):
            weights[name] = tensor.repeat(times, 1)
        elif name.endswith("mlp.down_proj.weight"):
            silent = torch.zeros(tensor.shape[0], tensor.shape[1] * (times - 1), dtype=tensor.dtype)
            weights[name] = torch.cat([tensor, silent], dim=1)


def main(
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    times: Annotated[int, typer.Option(min=2, help="Times the hidden units of each MLP.")] = WIDENED_TIMES,
) -> None:
    source = ensure()
    out.mkdir(parents=True)
    write_widened(source, out, times)


if __name__ == "__main__":
    typer.run(main)
