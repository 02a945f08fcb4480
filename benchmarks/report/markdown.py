"""Markdown as lists of lines: the same tables on a page and in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.report.statistics import Interval

WIDTH = 160

Cell = str | Callable[[dict], object]  # a format string of a row's fields, or what makes it of the row
Picture = Callable[
    [str, str], list[str]
]  # the lines that show a plot, by the end of its file's name and its title


def table(headings: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    return [_row(headings), "|" + "---|" * len(headings), *map(_row, rows), ""]


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def columns(rows: Iterable[dict], cells: Mapping[str, Cell]) -> list[str]:
    """A table with a line for each row. cells: by their headings."""
    return table(list(cells), [[_cell(cell, row) for cell in cells.values()] for row in rows])


def _cell(cell: Cell, row: dict) -> object:
    return cell.format_map(row) if isinstance(cell, str) else cell(row)


def pivot(rows: Sequence[dict], by: Sequence[str], across: str, cell: Cell) -> tuple[list, list[tuple]]:
    """The values of `across`, and for each combination of `by` its values and a cell under each of those."""
    values = in_order(rows, across)
    groups: dict[tuple, dict] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), {})[row[across]] = _cell(cell, row)
    return values, [(*key, *(cells.get(value, "") for value in values)) for key, cells in groups.items()]


def in_order(rows: Iterable[dict], key: str) -> list:
    """The values of a field, each once."""
    return list(dict.fromkeys(row[key] for row in rows))


def interval(value: dict) -> str:
    return str(Interval(**value))


def show(lines: Sequence[str]) -> None:
    Console(width=WIDTH).print(Markdown("\n".join(lines)))


def no_picture(name: str, title: str) -> list[str]:
    return []
