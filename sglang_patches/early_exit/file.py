"""The trained part of an early exit, and its file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

FORMAT = "specstore early exit 1"


class Adapter(torch.nn.Module):
    """Turns a hidden state into one that the target's own output head reads (equation 6, appendix E.2): H -> H/2 -> H.

    hidden: H.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.down = torch.nn.Linear(hidden, hidden // 2, bias=False)
        self.up = torch.nn.Linear(hidden // 2, hidden, bias=False)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """The state that the target's output head reads, [rows, H].

        state: [rows, H], the residual stream.
        """
        return self.up(torch.relu(self.down(state)))


@dataclass(frozen=True)
class About:
    """What an early exit belongs to. fingerprint: of the target's weights. layers: that the target has. hidden: width of its states.
    recall: by the number of its layers below the exit, share of tokens that were its first choice, and among its first 8."""

    fingerprint: str
    layers: int
    hidden: int
    recall: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class EarlyExits:
    """Adapters by the number of the target's layers below them."""

    about: About
    adapters: Mapping[int, Adapter]

    def save(self, file: Path) -> None:
        tensors = {
            f"{layer}.{name}": tensor.detach().to("cpu", torch.float32).contiguous()
            for layer, adapter in self.adapters.items()
            for name, tensor in adapter.state_dict().items()
        }
        new = file.with_name(f".{file.name}.new")
        save_file(tensors, new, {"format": FORMAT, "about": json.dumps(asdict(self.about))})
        new.replace(file)

    @classmethod
    def load(cls, file: Path) -> EarlyExits:
        """Raises ValueError that names the file for one that holds something else, OSError for one that cannot be read."""
        try:
            with safe_open(file, "pt") as opened:
                metadata = opened.metadata() or {}
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        except SafetensorError as error:
            raise ValueError(f"{file} holds no early exits: {error}") from error
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{file} holds no early exits: its format is {metadata.get('format')!r}")
        try:
            about = msgspec.json.decode(metadata.get("about", ""), type=About)
            return cls(about, {layer: _adapter(about, layer, tensors) for layer in _layers(tensors)})
        except ValueError as error:
            raise ValueError(f"{file} holds no early exits: {error}") from error

    def layer(self, wanted: int) -> int:
        """The number of layers below the exit that is wanted. Raises ValueError for one that is not here.

        wanted: number of layers, 0 for the exit in the middle of the target, as in the paper.
        """
        if wanted in self.adapters:
            return wanted
        if wanted:
            raise ValueError(f"{wanted} is none of its layers, which are {sorted(self.adapters)}")
        return min(self.adapters, key=lambda layer: abs(layer - self.about.layers / 2))


def _layers(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """Raises ValueError if there is none, or a name begins with something else."""
    layers = sorted({int(name.partition(".")[0]) for name in tensors})
    if not layers:
        raise ValueError("it has no tensors")
    return layers


def _adapter(about: About, layer: int, tensors: Mapping[str, torch.Tensor]) -> Adapter:
    """Raises ValueError for tensors that are not those of an adapter, before one is made."""
    if not 0 < layer < about.layers or str(layer) not in about.recall:
        raise ValueError(f"layer {layer} of {about.layers}, recall of {sorted(about.recall)}")
    half, own = about.hidden // 2, f"{layer}."
    found = {name.removeprefix(own): tensor for name, tensor in tensors.items() if name.startswith(own)}
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    if shapes != {"down.weight": (half, about.hidden), "up.weight": (about.hidden, half)}:
        raise ValueError(f"layer {layer}: {shapes} for states of width {about.hidden}")
    if not all(tensor.is_floating_point() for tensor in found.values()):
        raise ValueError(f"layer {layer}: no numbers of floating point")
    adapter = Adapter(about.hidden)
    adapter.load_state_dict(found)
    return adapter
