"""Makes a file of early exits from a model and its answers, and a picture of what they expect rightly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sglang_patches.early_exit.adapter import About, EarlyExits
from sglang_patches.early_exit.fingerprint import model_fingerprint
from sglang_patches.early_exit.states import States, Text, collect
from sglang_patches.early_exit.training import Training

DEPTHS = (0.25, 0.5, 0.75)  # of the target, as in the paper
HELD_OUT = 10  # of so many texts, one tells the recall and is not trained on
EPOCHS = 4


SHOWN = (1, 8)  # choices whose recall the table and the server's log tell


@dataclass(frozen=True)
class Run:
    """What is trained. model: folder. out: file of the exits; beside it stand its checkpoint, and the report as .json and .png."""

    model: Path
    texts: Sequence[Text]
    out: Path
    epochs: int = EPOCHS
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
    with _bars(console) as bars:
        states = _collected(model, run.texts, layers, bars)
        held_out = states.text % HELD_OUT == HELD_OUT - 1 if len(run.texts) >= HELD_OUT else states.text == 0
        head = model.get_output_embeddings().weight.detach()
        training = Training(states.where(~held_out), head, run.epochs, identity, run.checkpoint)
        _trained(training, bars)
    recall = training.recall(states.where(held_out))
    first, others = SHOWN
    shown = {str(layer): (of[first - 1], of[others - 1]) for layer, of in recall.items()}
    about = About(fingerprint, depth, head.shape[1], shown)
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


def _bars(console: Console) -> Progress:
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
