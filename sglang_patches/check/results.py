"""Results of a check, and the table of the host's symbols. Results are kept in a folder: a later call with the same folder goes on where
this one ended."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from sglang_patches.host.symbols import check_host
from sglang_patches.host.versions import INSTALLED, TESTED

OK = "ok"  # begins the state of a row that passed


@dataclass(frozen=True)
class Result:
    """A row of the table. state: begins with `OK`, or says what is wrong. data: what was measured."""

    state: str
    seconds: float = 0.0
    data: dict = field(default_factory=dict)

    @property
    def fine(self) -> bool:
        return self.state.startswith(OK)


class OtherRunError(ValueError):
    """The folder holds results of something else."""


class Results:
    """What a folder holds: `results.json`, written again after each result, and the engines' answers in files of their own."""

    def __init__(self, folder: Path, about: dict) -> None:
        """Opens the folder with the results that it holds. Raises OtherRunError where they are of something else.

        about: what is checked, with what, on what.
        """
        self.folder, self.about = folder, about
        self.rows: dict[str, Result] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "results.json"
        if self._file.exists():
            self._read(json.loads(self._file.read_text()))

    def _read(self, kept: dict) -> None:
        own = json.loads(json.dumps(self.about))
        if kept["about"] != own:
            names = {name for name in {*kept["about"], *own} if kept["about"].get(name) != own.get(name)}
            raise OtherRunError(
                f"{self.folder} holds results with another {', '.join(sorted(names))}: give another folder"
            )
        self.rows = {row.pop("check"): Result(**row) for row in kept["rows"]}

    def add(self, name: str, result: Result) -> None:
        self.rows[name] = result
        rows = [{"check": name} | asdict(row) for name, row in self.rows.items()]
        _write(self._file, {"about": self.about, "rows": rows})

    def failed(self) -> Iterable[str]:
        return [name for name, row in self.rows.items() if not row.fine]

    def keep_answers(self, name: str, answers: dict) -> None:
        _write(self.folder / "answers" / f"{name}.json", answers)

    def answers(self, name: str) -> dict:
        return json.loads((self.folder / "answers" / f"{name}.json").read_text())


def _write(file: Path, content: dict) -> None:
    """Writes the file in one step: whoever stops the check leaves no half of a file."""
    file.parent.mkdir(exist_ok=True)
    new = file.with_name(f".{file.name}.new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    new.replace(file)


def host_table() -> tuple[Table, bool]:
    """The table, and whether every row is as expected."""
    table = Table(title=f"SGLang {INSTALLED} (tested: {', '.join(TESTED)})")
    for heading in ("symbol", "state", "used for"):
        table.add_column(heading)
    rows = check_host()
    for symbol, drift in rows:
        table.add_row(symbol.path, drift or "ok", symbol.why)
    return table, not any(drift for _, drift in rows)
