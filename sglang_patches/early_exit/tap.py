"""Reads the target's hidden states in the middle of a verification, without a change to what it computes.

SGLang's own way for draft models that read such states is used: a decoder layer that is called with `capture_output` hands out the
residual stream that it begins with. So one layer's `forward` is wrapped, and no other part of the model.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from sglang.srt.runtime_context import get_parallel

from sglang_patches.early_exit.file import Adapter
from sglang_patches.verification.shared_noise import NO_NOISE, best

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

CAPTURE = "capture_output"

# Takes tokens, int32 [read, choices], and probabilities, float32 [read, choices], the likeliest first, of the rows that were read.
Receiver = Callable[[np.ndarray, np.ndarray], None]


class Draws(NamedTuple):
    """The rows of a verification that are read, and how they are drawn. rows: int64 [read], ascending. temperatures: float32 [read].
    seeds: int64 [read] as of `shared_noise.best`. positions: int64 [read], index in its sequence of the token that is drawn. All on
    the host."""

    rows: np.ndarray
    temperatures: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray

    @classmethod
    def of_batch(
        cls, requests: Sequence[tuple[float, int | None]], positions: np.ndarray, rows: np.ndarray
    ) -> Draws:
        """The draws of a batch's rows that are read.

        requests: temperature and seed of each; the seed is None for one that shares no noise.
        positions: int64, of all nodes, which are their rows; each request has as many as the others.
        """
        of = rows // (len(positions) // len(requests))
        warmth = [1.0 if seed is None else temperature for temperature, seed in requests]
        seeds = [NO_NOISE if seed is None else seed for _, seed in requests]
        return cls(rows, np.array(warmth, np.float32)[of], np.array(seeds, np.int64)[of], positions[rows] + 1)


class EarlyExit:
    """The target's output head after an adapter: `logits`, `whole` and `choices` in turn."""

    def __init__(self, runner: ModelRunner, adapter: Adapter) -> None:
        self._model, self._vocabulary = runner.model, runner.model_config.vocab_size
        self._adapter = adapter.to(runner.device, runner.dtype)

    @torch.no_grad()
    def expects(
        self,
        states: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        choices: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, int64 [rows, choices], and their probabilities, float32 [rows, choices], best first. states: [rows, H]. temperatures:
        float32 [rows]. seeds, positions: int64 [rows], as of `shared_noise.best`.

        It draws with the noise that the target will draw with. Top-k, top-p and min-p are left out: what they take away is rarely
        among the first."""
        logits = self.whole(self.logits(states))
        return self.choices(logits, temperatures, seeds, positions, choices)

    @property
    def divided(self) -> bool:
        """Whether each tensor-parallel rank has a part of the head."""
        return get_parallel().tp_group.world_size > 1

    @torch.no_grad()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """This rank's part of them. states: [rows, H]."""
        return self._model.logits_processor._compute_lm_head(self._adapter(states), self._model.lm_head)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """All ranks' parts. To be called where the target's own collectives are launched: the ranks share a communicator with them, which
        takes them in one order on all ranks."""
        return get_parallel().tp_group.all_gather(logits) if self.divided else logits

    def choices(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        choices: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best tokens and their probabilities, as `expects` returns them.

        logits: whole, [rows, vocabulary and padding].
        """
        logits = logits[:, : self._vocabulary]
        probabilities = torch.softmax(logits.float() / temperatures.view(-1, 1), dim=-1)
        return best(probabilities, seeds, positions, choices)


class Tap(ABC):
    """Between `expect` and the end of the next forward it hands out what the early exit expects."""

    def __init__(self, runner: ModelRunner, adapter: Adapter, layer: int) -> None:
        """Taps the layer that the exit reads. Raises ValueError that names a model whose layers hand nothing out.

        layer: number of layers below the exit.
        """
        self._exit = EarlyExit(runner, adapter)
        wrap(tapped_layer(runner.model, layer), self._captured)

    @abstractmethod
    def expect(self, draws: Draws, choices: int, receiver: Receiver) -> None:
        """Asks for what the early exit expects in the forward that is launched next.

        choices: number of choices of a row.
        """

    @abstractmethod
    def _captured(self, states: torch.Tensor) -> None:
        """Takes the states of a verification.

        states: [rows, H], not to be kept.
        """


class HostTap(Tap):
    """On a CPU the target waits for its early exit: the layers behind it begin once the receiver has returned."""

    _expected: tuple[Draws, int, Receiver] | None = None

    def expect(self, draws: Draws, choices: int, receiver: Receiver) -> None:
        self._expected = draws, choices, receiver

    def _captured(self, states: torch.Tensor) -> None:
        if self._expected is None:
            return
        (draws, choices, receiver), self._expected = self._expected, None
        rows, *drawn = map(torch.from_numpy, draws)
        tokens, chances = self._exit.expects(states[rows], *drawn, choices)
        receiver(tokens.to(torch.int32).numpy(), chances.numpy())


def tapped_layer(model: torch.nn.Module, layer: int) -> torch.nn.Module:
    """The layer that begins with what `layer` layers have made."""
    layers = getattr(getattr(model, "model", None), "layers", ())
    found = layers[layer] if 0 < layer < len(layers) else None
    complete = hasattr(model, "lm_head") and hasattr(model, "logits_processor")
    if found is None or not complete or CAPTURE not in inspect.signature(found.forward).parameters:
        raise ValueError(f"{type(model).__name__}: its layers do not hand out their hidden states in SGLang")
    return found


def wrap(layer: torch.nn.Module, receiver: Callable[[torch.Tensor], None]) -> None:
    """Hands the receiver what the layer begins with in verifications. Who else asks for it still gets it."""
    stock = layer.forward
    place = list(inspect.signature(stock).parameters).index("forward_batch")

    @functools.wraps(stock)
    def forward(*arguments: Any, **named: Any) -> object:
        batch = arguments[place] if len(arguments) > place else named["forward_batch"]
        if not batch.forward_mode.is_target_verify():
            return stock(*arguments, **named)
        asked = named.pop(CAPTURE, None)

        def captured(states: torch.Tensor, *, owned: bool = False) -> None:
            receiver(states)
            if asked is not None:
                asked(states, owned=owned)

        return stock(*arguments, **named, **{CAPTURE: captured})

    layer.forward = forward
