"""Greedy output of a model with and without specstore, on the device that will serve it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from sglang_patches.drafting.registry import DEFAULT

PROMPTS = (
    "The days of the week are Monday, Tuesday, Wednesday, Thursday,",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List the planets of the solar system in order from the sun, one a line.",
    "Repeat this sentence five times: The quick brown fox jumps over the lazy dog.",
    "Explain in three sentences why the sky is blue.",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
)
DRAFTING = ("--speculative-", "--specstore-")  # flags that begin so
OK = "ok"  # begins the state of a check that passed
ROUNDS = 2  # the second finds the answers of the first in the datastore, so that whole trees are accepted
TIMEOUT_SECONDS = 540.0
# A difference counts as rounding if plain decoding itself was undecided there: its two likeliest tokens are this close.
# The bounds are chosen; on an H100 bfloat16 parted at up to 0.25 (docs/accelerators.md). The table counts the differences within them.
ROUNDING_LOGPROB = {"float32": 1e-4, "bfloat16": 0.3, "float16": 0.1}


@dataclass
class Comparison:
    """Two engines, one after the other, each in its own process."""

    model: str
    device: str
    tokens: int
    flags: list[str] = field(default_factory=list)
    _plain: dict = field(default_factory=dict)
    _speculative: dict = field(default_factory=dict)

    def answer_plainly(self) -> str | None:
        self._plain = self._answers(_without_drafting(self.flags))
        return None

    def answer_speculatively(self) -> str | None:
        """The start probes tree attention: a backend that ignores the mask ends the engine here, by name."""
        self._speculative = self._answers(["--speculative-algorithm", DEFAULT, *self.flags])
        per_step = self._speculative["tokens_per_step"]
        return None if per_step > 1 else f"no drafted token was accepted ({per_step:.2f} tokens a step)"

    def compare(self) -> str | None:
        if not (self._plain and self._speculative):
            return "not compared: an engine failed"
        differences = [
            (answer, first)
            for answer, (plain, ours) in enumerate(
                zip(self._plain["tokens"], self._speculative["tokens"], strict=True)
            )
            if (first := _first_difference(plain, ours)) is not None
        ]
        margins = [self._plain["margins"][answer][first] for answer, first in differences]
        allowed = ROUNDING_LOGPROB.get(self._plain["dtype"], 0.0)
        wrong = [margin for margin in margins if not margin <= allowed]
        if not wrong:
            return f"{OK}, {len(differences)} answers part by rounding" if differences else None
        return (
            f"{len(wrong)} of {len(self._plain['tokens'])} answers differ by more than rounding: plain decoding preferred its "
            f"token by up to {max(wrong):.3g} in log-probability, {self._plain['dtype']} explains {allowed:.3g}"
        )

    def _answers(self, flags: list[str]) -> dict:
        """Raises RuntimeError with the engine's last lines when it fails."""
        words = ["--model-path", self.model, "--device", self.device, *flags]
        if self.device == "cpu":
            words += ["--sampling-backend", "pytorch"]
        with tempfile.TemporaryDirectory() as folder:
            out, log = Path(folder, "answers.json"), Path(folder, "log")
            command = [
                sys.executable,
                "-m",
                "sglang_patches.check.answers",
                str(out),
                str(self.tokens),
                *words,
            ]
            with log.open("w") as file:
                _finish(subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True))
            if not out.exists():
                raise RuntimeError(_last_words(log.read_text()))
            return json.loads(out.read_text())


def _without_drafting(flags: list[str]) -> list[str]:
    """The flags, with their values, that plain decoding has too."""
    kept, keep = [], True
    for word in flags:
        if word.startswith("--"):
            keep = not word.startswith(DRAFTING)
        if keep:
            kept.append(word)
    return kept


def _finish(child: subprocess.Popen) -> None:
    """Waits for the engine, then kills what is left of its process group."""
    try:
        child.wait(TIMEOUT_SECONDS)
    finally:
        try:
            os.killpg(child.pid, 9)
        except ProcessLookupError:
            child.wait()


def _last_words(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "specstore" in line] or lines[-3:]
    return " / ".join(errors[-3:])[:600]


def _first_difference(plain: list[int], ours: list[int]) -> int | None:
    for index, (left, right) in enumerate(zip(plain, ours, strict=False)):
        if left != right:
            return index
    return None if len(plain) == len(ours) else min(len(plain), len(ours)) - 1
