"""`python -m sglang_patches.demo.widened OUT`: a target that costs what a model of billions of weights costs and says what the demo model
says.

On a GPU the demo model is no target to measure with: its forward takes less than the host's work for a step. Here each MLP gets
further hidden units whose outputs are multiplied by zero. They are read and computed in every step, and add nothing.
"""

from pathlib import Path
from typing import Annotated

import typer

from .model import ensure
from .variant import write_variant

TIMES = 85  # with the demo model 6.8 billion weights


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
    times: Annotated[int, typer.Option(min=2, help="Times the hidden units of each MLP.")] = TIMES,
) -> None:
    source = ensure()
    out.mkdir(parents=True)
    write_widened(source, out, times)


if __name__ == "__main__":
    typer.run(main)
