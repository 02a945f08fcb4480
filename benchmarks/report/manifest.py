"""What a run was made with, written next to its results."""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from benchmarks.prompts import digest
from sglang_patches.launch.serve import suitable_dtype
from tests.support.servers.engine import DEVICE

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = ("specstore", "sglang", "torch", "numba", "numpy", "grpcio")


def manifest(command: str, files: Iterable[Path], given: argparse.Namespace) -> dict:
    """Versions, commit, lock hash, processor, the hashes of the files read and the run's settings. command: the benchmark's
    module. Files are given by their names alone: where they lie is nobody else's business."""
    return {
        "command": command,
        "packages": {name: version(name) for name in PACKAGES},
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=PROJECT, capture_output=True, text=True, check=True
        ).stdout.strip(),
        "lock": hashlib.sha256((PROJECT / "requirements" / "lock.txt").read_bytes()).hexdigest(),
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "prompts": {file.name: digest(file) for file in files},
        "settings": {name: _without_folder(value) for name, value in vars(given).items()},
    }


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


def command(made: dict) -> str:
    """The words that repeat a run."""
    words = ["python -m benchmarks." + made["command"]]
    for name, value in made["settings"].items():
        if value in (None, False, [], "", 0) or name == "json":
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        words.append(" ".join([f"--{name.replace('_', '-')}", *map(str, values)]))
    return " ".join(words)
