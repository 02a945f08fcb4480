"""What the trained exits expect rightly, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

SHOWN = (1, 8)  # choices whose recall the table and the server's log tell


def draw(recall: Mapping[int, Sequence[float]], layers: int, file: Path) -> None:
    """Draws the recall of the exits. Needs matplotlib.

    recall: by layer, as from `Training.recall`.
    layers: of the target.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    by_layer, by_count = figure.subplots(1, 2)
    at = sorted(recall)
    for count in SHOWN:
        by_layer.plot(at, [recall[layer][count - 1] for layer in at], "o-", label=f"first {count}")
    by_layer.set(xlabel=f"layers below the exit, of {layers}", ylabel="share of the target's tokens")
    for layer in at:
        by_count.plot(range(1, len(recall[layer]) + 1), recall[layer], label=f"after {layer} layers")
    by_count.set(xlabel="choices (kappa)", xscale="log")
    for panel in (by_layer, by_count):
        panel.set_ylim(0, 1)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.savefig(file, dpi=110)
