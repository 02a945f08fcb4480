"""Makes a file of early exits from a model and its answers, and a picture of what they expect rightly. The adapters of all exits are
trained at once; the target stays as it is (MIRROR, appendix E.2)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn.functional import cross_entropy, linear

from sglang_patches.early_exit.file import About, Adapter, EarlyExits
from sglang_patches.early_exit.fingerprint import model_fingerprint
from sglang_patches.training import EXIT_EPOCHS
from sglang_patches.training.answers import States, Text, collect

DEPTHS = (0.25, 0.5, 0.75)  # of the target, as in the paper
HELD_OUT = 10  # of so many texts, one tells the recall and is not trained on
RATE = 2e-3  # of learning, at its highest
WARM_UP = 0.05  # share of the steps
BATCH = 256  # tokens
RANKS = 32  # choices whose recall is told
SHOWN = (1, 8)  # those of them that the table and the server's log tell


@dataclass(frozen=True)
class Run:
    """What is trained. model: folder. out: file of the exits; beside it stand its checkpoint, and the report as .json and .png."""

    model: Path
    texts: Sequence[Text]
    out: Path
    epochs: int = EXIT_EPOCHS
    device: str = "cpu"

    @property
    def checkpoint(self) -> Path:
        return self.out.with_suffix(".checkpoint")


def train(run: Run, console: Console) -> EarlyExits:
    """Goes on from a checkpoint that is there. Raises ValueError for a model or texts that cannot be used, and `OtherRunError`."""
    from transformers import AutoModelForCausalLM

    _check(run)
    dtype = torch.float32 if run.device == "cpu" else "auto"
    model = AutoModelForCausalLM.from_pretrained(run.model, dtype=dtype).to(run.device).eval()
    depth = model.config.get_text_config().num_hidden_layers
    layers = sorted({min(depth - 1, max(1, round(depth * share))) for share in DEPTHS})
    fingerprint = model_fingerprint(run.model)
    identity = {
        "model": fingerprint,
        "texts": hashlib.sha256(json.dumps(run.texts).encode()).hexdigest(),
        "epochs": run.epochs,
    }
    with bars(console) as shown:
        states = _collected(model, run.texts, layers, shown)
        held_out = states.text % HELD_OUT == HELD_OUT - 1 if len(run.texts) >= HELD_OUT else states.text == 0
        head = model.get_output_embeddings().weight.detach()
        training = Training(states.where(~held_out), head, run.epochs, identity, run.checkpoint)
        _trained(training, shown)
    recall = training.recall(states.where(held_out))
    first, others = SHOWN
    told = {str(layer): (of[first - 1], of[others - 1]) for layer, of in recall.items()}
    about = About(fingerprint, depth, head.shape[1], told)
    exits = EarlyExits(about, training.adapters)
    exits.save(run.out)
    _write_report(run, recall, about, int(held_out.sum()), console)
    run.checkpoint.unlink(missing_ok=True)
    return exits


def _check(run: Run) -> None:
    """Before minutes of work. Raises ValueError."""
    if len(run.texts) < 2:
        raise ValueError(f"answers: {len(run.texts)}, give at least 2: some are held out")
    if not run.out.parent.is_dir():
        raise ValueError(f"out: no folder {run.out.parent}")
    if torch.device(run.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {run.device}, and torch finds no GPU")


def bars(console: Console) -> Progress:
    """The progress of a training: what is done, how far, the time that is left, and a note."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console)


def _collected(model, texts: Sequence[Text], layers: Sequence[int], bars: Progress) -> States:
    task = bars.add_task(
        "the model reads its answers' tokens", total=sum(len(t.answer) for t in texts), note=""
    )
    return collect(model, texts, layers, lambda tokens: bars.advance(task, tokens))


def _trained(training: Training, bars: Progress) -> None:
    task = bars.add_task("training steps", total=training.steps, completed=training.step, note="")
    training.run(lambda step, loss: bars.update(task, completed=step, note=f"loss {loss:.2f}"))


def _write_report(
    run: Run, recall: dict[int, list[float]], about: About, tokens: int, console: Console
) -> None:
    """Writes the recall as .json, and as .png where matplotlib is installed.

    tokens: number of tokens that the recall is of.
    """
    told = {"layers": about.layers, "held_out_tokens": tokens, "recall": recall}
    run.out.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    if find_spec("matplotlib") is None:
        console.print("no picture of the recall: matplotlib is not installed")
    else:
        draw(recall, about.layers, run.out.with_suffix(".png"))


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
