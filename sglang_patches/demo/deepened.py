"""A target that costs several times the demo model's compute and says the same: what a draft model can be faster than.

Behind each block come copies of it whose attention and MLP write zeros. They compute as much as the block, and add nothing.
"""

import re
from pathlib import Path

from .folder import MODEL_NAME, demo_model_dir, made_once
from .model import ensure
from .variant import write_variant

TIMES = 4
# What a block adds to the residual stream leaves these.
OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")


def deepened_target(times: int = TIMES) -> Path:
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
