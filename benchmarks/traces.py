"""Recorded answers: what `python -m benchmarks.record` writes, and the small set that comes with the project."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"
SHIPPED = DATA / "traces.jsonl.gz"  # the demo model's answers to benchmarks/data/prompts.jsonl
SHIPPED_PRIOR = DATA / "prior.jsonl.gz"  # its answers to questions of its own
SHIPPED_LANGUAGE = DATA / "french.jsonl.gz"  # its answers to other French prompts


@dataclass(frozen=True)
class Trace:
    """prompt, output: int32 token ids."""

    category: str
    prompt: np.ndarray
    output: np.ndarray


def recorded_rows(path: Path) -> list[dict]:
    """The lines of a recorded file, which may be compressed (.gz). Raises ValueError for one without the prompts' token ids."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    for number, row in enumerate(rows, 1):
        if "prompt_tokens" not in row:
            raise ValueError(f"{path}:{number}: no field prompt_tokens; record the answers anew")
    return rows


def load_traces(*paths: Path) -> list[Trace]:
    """Raises ValueError as `recorded_rows`."""
    return [
        Trace(row["category"], np.array(row["prompt_tokens"], np.int32), np.array(row["tokens"], np.int32))
        for path in paths
        for row in recorded_rows(path)
    ]


def by_category(traces: Sequence[Trace]) -> dict[str, list[Trace]]:
    categories: dict[str, list[Trace]] = {}
    for trace in traces:
        categories.setdefault(trace.category, []).append(trace)
    return categories
