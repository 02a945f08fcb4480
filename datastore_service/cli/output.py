"""Prints tables for people, JSON for scripts, and progress on a terminal."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Sequence

from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]
from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

errors = Console(stderr=True, highlight=False, soft_wrap=True)


def tables() -> Console:
    """A console as wide as the terminal is now. Clients choose the names that it prints, so it obeys no markup."""
    return Console(markup=False, emoji=False)


def write_what_the_terminal_lacks_as_escapes() -> None:
    """A name that an encoding such as ASCII does not have must not end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def visible(text: object) -> str:
    """The text with escapes for what a terminal obeys or hides: control characters, bidirectional overrides, lone surrogates."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in str(text)
    )


def print_reply(reply: Message, as_json: bool, shown: str | Table) -> None:
    """Prints the reply as JSON, or `shown`, which says the same to people."""
    if as_json:
        print_json(reply)
    elif isinstance(shown, Table):
        tables().print(shown)
    else:
        print(visible(shown))


def print_json(reply: Message) -> None:
    """Prints protobuf's JSON, in which 64-bit numbers are strings."""
    fields = MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    print(json.dumps(fields, indent=2))


def table_of(headings: tuple[str, ...], rows: Iterable[Sequence[object]]) -> Table:
    table = Table(*headings)
    for row in rows:
        table.add_row(*map(visible, row))
    return table


def progress(*columns: ProgressColumn) -> Progress:
    """A progress line on standard error, if that is a terminal."""
    line = SpinnerColumn(), TextColumn("{task.description}"), *columns, TimeElapsedColumn()
    return Progress(*line, console=errors, transient=True, disable=not errors.is_terminal)
