"""The file a benchmark leaves: what it was run with (a manifest) and its results as JSON, one row of a table a line."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import numpy as np

from benchmarks.prompts import digest
from benchmarks.report import page
from benchmarks.report.markdown import show
from benchmarks.report.statistics import Interval
from sglang_patches.launch.serve import suitable_dtype
from tests.support.servers.engine import DEVICE

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = ("specstore", "sglang", "torch", "numba", "numpy", "grpcio")


def manifest(command: str, files: Iterable[Path], given: argparse.Namespace) -> dict:
    """Versions, commit, lock hash, processor, the hashes of the files read and the run's settings. command: the benchmark's
    module. Files are given by their names alone: where they lie is nobody else's business."""
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, cwd=PROJECT, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "command": command, "packages": {name: version(name) for name in PACKAGES}, "commit": commit,
        "lock": hashlib.sha256((PROJECT / "requirements" / "lock.txt").read_bytes()).hexdigest(),
        "python": platform.python_version(), "processor": _processor(), "cores": os.cpu_count(),
        "prompts": {file.name: digest(file) for file in files},
        "settings": {name: _without_folder(value) for name, value in vars(given).items()},
    }  # fmt: skip


def _without_folder(value: object) -> object:
    if isinstance(value, Path):
        return value.name
    return [_without_folder(one) for one in value] if isinstance(value, list | tuple) else value


def _processor() -> str:
    """Its name, and what of it decides how long a step takes."""
    from torch.backends.cpu import get_cpu_capability

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    bfloat16 = "with" if suitable_dtype(DEVICE) == "bfloat16" else "without"
    return f"{next(names, 'unknown')} ({get_cpu_capability()}, {bfloat16} bfloat16)"


DIGITS = 6  # significant ones
JOURNAL = ".journal.jsonl"  # how the names of raw records end


class Journal:
    """The raw record of a run, a line at a time, so that a broken run keeps what it has: the manifest, then each load's record."""

    def __init__(self, path: Path, manifest: dict) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(manifest) + "\n")

    def add(self, kind: str, record: dict) -> None:
        """Appends a record. kind: for example group."""
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind} | record) + "\n")


def journalled(path: Path) -> tuple[dict, dict[str, list[dict]]]:
    """The manifest, and the records by their kind."""
    found: dict[str, list[dict]] = defaultdict(list)
    manifest, *rows = map(json.loads, path.read_text().splitlines())
    for row in rows:
        found[row.pop("kind")].append(row)
    return manifest, found


def finish(command: str, given: argparse.Namespace, files: Iterable[Path] = (), **results: object) -> None:
    """Prints a run's tables and writes its record if --json asks for it. files: prompts and answers that were read."""
    text = dumps({"manifest": manifest(command, files, given), **results})
    show(page.tables_of(json.loads(text)))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(text)


def dumps(record: dict) -> str:
    return _lines(_plain(record)) + "\n"


def _lines(value: object) -> str:
    """A line for each entry that holds no table, and for each row of a table."""
    if isinstance(value, dict) and any(_is_nested(entry) for entry in value.values()):
        entries = (f"{json.dumps(name)}: {_lines(entry)}" for name, entry in value.items())
        return "{\n" + ",\n".join(entries) + "\n}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
    return json.dumps(value)


def _is_nested(value: object) -> bool:
    rows = value if isinstance(value, list) else []
    return isinstance(value, dict) or any(isinstance(row, dict) for row in rows)


def _plain(value: object) -> object:
    """As JSON has it, floats rounded."""
    if isinstance(value, Interval):
        return _plain(value.as_dict())
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return value if isinstance(value, str | int | None) else str(value)
