"""Options that several benchmarks have."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_patches.launch.serve import suitable_dtype
from tests.support.servers.engine import DEVICE


def options(command: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks.<command>`. description: the module's docstring, which begins with that command."""
    summary = (description or "").splitlines()[0].split(": ", 1)[-1]
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{command}", description=summary)
    parser.add_argument("--json", type=Path, help="file to write the results to")
    return parser


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokenizer", type=_file, required=True, help="tokenizer.json")


def _file(path: str) -> Path:
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{path}: no such file")
    return Path(path)


def add_dtype(parser: argparse.ArgumentParser) -> None:
    default = suitable_dtype(DEVICE)
    parser.add_argument(
        "--dtype", default=default, help="default: bfloat16 where the processor multiplies it, else float32"
    )


def check_positive(parser: argparse.ArgumentParser, given: argparse.Namespace, *names: str) -> None:
    """Numbers, or lists of them, that must be above 0."""
    for name in names:
        value = getattr(given, name)
        if min(value if isinstance(value, list) else [value]) <= 0:
            parser.error(f"--{name.replace('_', '-')}: {value} is not above 0")
