"""How the benchmarks declare their options, and those that several of them have."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

NEEDED = {"type": Path, "required": True}  # a file or folder without a default


class Parser(argparse.ArgumentParser):
    """The options of `python -m benchmarks.<command>`. description: the module's docstring, which begins with that command. records:
    whether it writes results, and to which file if none is given."""

    def __init__(self, command: str, description: str | None, records: bool | str = True) -> None:
        summary = (description or "").splitlines()[0].split(": ", 1)[-1]
        super().__init__(prog=f"python -m benchmarks.{command}", description=summary)
        if records:
            default = Path(records) if isinstance(records, str) else None
            self.add("--json", default, "file to write the results to", type=Path)

    def add(self, name: str, default: object, meaning: str, **more: object) -> None:
        """Declares an option. Its default says what is given: a flag, a word, a path, a number above 0 (or 0, if that is the default),
        or several of one of these."""
        values = default if isinstance(default, list) else [default]
        if isinstance(default, list):
            more.setdefault("nargs", "+")
        if isinstance(default, bool):
            more["action"] = "store_true"
        elif values and default is not None:
            more.setdefault(
                "type", number(values[0]) if isinstance(values[0], int | float) else type(values[0])
            )
        if default not in (None, False, []):
            shown = (
                value.name if isinstance(value, Path) and value.is_absolute() else str(value)
                for value in values
            )
            meaning = f"{meaning} (default: {' '.join(shown)})"
        self.add_argument(name, default=default, help=meaning, **more)

    def parse_args(self, *words: Sequence[str] | None) -> argparse.Namespace:  # type: ignore[override]
        """Looks for what the processor multiplies only where --dtype is not given: torch is imported for it."""
        given = super().parse_args(*words)
        if getattr(given, "dtype", "") is None:
            given.dtype = own_dtype()
        return given


def number(example: float) -> Callable[[str], float]:
    """What reads a number of the example's type, above 0, or not below if the example is 0."""
    kind = type(example)

    def read(text: str) -> float:
        value = kind(text)
        if value < 0 or value == 0 != example:
            raise argparse.ArgumentTypeError(f"{value} is not above 0")
        return value

    read.__name__ = kind.__name__  # of argparse's own message
    return read


def own_dtype() -> str:
    from sglang_patches.launch.serve import suitable_dtype
    from tests.support.servers.engine import DEVICE

    return suitable_dtype(DEVICE)


def add_tokenizer(parser: Parser) -> None:
    parser.add("--tokenizer", None, "tokenizer.json of the vocabulary", type=_file, required=True)


def _file(path: str) -> Path:
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{path}: no such file")
    return Path(path)


def add_dtype(parser: Parser) -> None:
    parser.add(
        "--dtype", None, "of the models (default: bfloat16 where the processor multiplies it, else float32)"
    )
