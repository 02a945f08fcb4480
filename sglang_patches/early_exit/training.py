"""Trains the adapters of all exits at once; the target stays as it is (appendix E.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear

from sglang_patches.early_exit.adapter import Adapter
from sglang_patches.early_exit.states import States

RATE = 2e-3  # of learning, at its highest
WARM_UP = 0.05  # share of the steps
BATCH = 256  # tokens
RANKS = 32  # choices whose recall is told


class OtherRunError(ValueError):
    """A checkpoint belongs to another run."""


@dataclass
class Training:
    """Trains the adapters of all exits, from the checkpoint on if there is one. Raises `OtherRunError` for a checkpoint of another run.

    head: the target's output head, [vocabulary, H], not changed; the adapters are on its device.
    identity: what a checkpoint belongs to.
    checkpoint: its file.
    """

    states: States
    head: torch.Tensor
    epochs: int
    identity: Mapping[str, Any]
    checkpoint: Path
    step: int = 0
    adapters: dict[int, Adapter] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        hidden = next(iter(self.states.states.values())).shape[1]
        self.adapters = {layer: Adapter(hidden).to(self.head.device) for layer in self.states.states}
        self._optimizer = torch.optim.AdamW(
            [weight for adapter in self.adapters.values() for weight in adapter.parameters()], lr=RATE
        )
        self._resume()

    @property
    def steps(self) -> int:
        return self.epochs * self._batches

    @property
    def _batches(self) -> int:
        return -(-len(self.states) // BATCH)

    def run(self, told: Callable[[int, float], None]) -> None:
        """To the end. Writes a checkpoint after each epoch, and when it is interrupted. told: of each step, and its loss."""
        try:
            while self.step < self.steps:
                told(self.step + 1, self._take_step())
                if self.step % self._batches == 0:
                    self.save()
        except KeyboardInterrupt:
            self.save()
            raise

    def save(self) -> None:
        new = self.checkpoint.with_name(f"{self.checkpoint.name}.new")
        state = {
            "identity": dict(self.identity),
            "step": self.step,
            "adapters": {layer: adapter.state_dict() for layer, adapter in self.adapters.items()},
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, new)
        new.replace(self.checkpoint)

    def _resume(self) -> None:
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, weights_only=True)
        if state["identity"] != dict(self.identity):
            raise OtherRunError(
                f"{self.checkpoint} is of a run with other settings: remove it to begin again"
            )
        self.step = state["step"]
        for layer, adapter in self.adapters.items():
            adapter.load_state_dict(state["adapters"][layer])
        self._optimizer.load_state_dict(state["optimizer"])

    def _take_step(self) -> float:
        """Cross entropy to what the target expects, the mean over the exits (equation 15)."""
        chosen = self._batch()
        expected = self.states.expected[chosen].to(self.head.device)
        logits = (self._logits(layer, self.states.states[layer][chosen]) for layer in self.adapters)
        loss = torch.stack([cross_entropy(of_layer, expected) for of_layer in logits]).mean()
        for group in self._optimizer.param_groups:
            group["lr"] = RATE * pace(self.step / self.steps)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.step += 1
        return loss.item()

    def _batch(self) -> torch.Tensor:
        """Tokens of the step. The same order in every run: one that was interrupted goes on as if it had not been."""
        epoch, batch = divmod(self.step, self._batches)
        order = torch.randperm(len(self.states), generator=torch.Generator().manual_seed(epoch))
        return order[batch * BATCH : (batch + 1) * BATCH]

    def _logits(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        adapted = self.adapters[layer](states.to(self.head.device, torch.float32))
        return linear(adapted.to(self.head.dtype), self.head).float()

    @torch.inference_mode()
    def recall(self, states: States) -> dict[int, list[float]]:
        """The share of the tokens that are among an exit's first 1, 2, ... RANKS choices, by layer."""
        ranks: dict[int, list[torch.Tensor]] = {layer: [] for layer in self.adapters}
        for begin in range(0, len(states), BATCH):
            rows = slice(begin, begin + BATCH)
            expected = states.expected[rows].view(-1, 1).to(self.head.device)
            for layer, found in ranks.items():
                logits = self._logits(layer, states.states[layer][rows])
                found.append((logits > logits.gather(1, expected)).sum(1))
        return {
            layer: [float((torch.cat(found) < count).float().mean()) for count in range(1, RANKS + 1)]
            for layer, found in ranks.items()
        }


def pace(done: float) -> float:
    """The factor of the learning rate after a share of the steps: it rises in a line, then falls in one."""
    return min(1.0, (done + 1e-3) / WARM_UP, 1.02 - done)
