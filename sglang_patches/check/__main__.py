"""`python -m sglang_patches.check`: does this SGLang, and with --device this machine, do what specstore needs?"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sglang_patches.check.greedy import OK, Comparison
from sglang_patches.check.host import host_table

console = Console(width=None if sys.stdout.isatty() else 200)


def main(
    context: typer.Context,
    device: Annotated[
        str | None, typer.Option(help="Check this device too: cuda or cpu. Takes minutes and needs --model.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder of a model that the device can hold.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the answers that are compared.")] = 100,
) -> None:
    """Compares the symbols that the plugin touches with the installed SGLang. With --device it also runs the kernels, the
    probe of tree attention and a greedy comparison with plain decoding; further flags go to SGLang. Exits with status 1 if a check
    fails."""
    if device is not None and model is None:
        raise typer.BadParameter("--device needs --model")
    if model is not None and not Path(model).is_dir():
        raise typer.BadParameter(f"--model: {model}: no such folder")
    if device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # read when SGLang is imported, here and in the engines
    table, fine = host_table()
    if device is None or model is None:
        console.print(table)
        raise typer.Exit(not fine)
    checks: dict[str, Callable[[], str | None]] = {
        "host symbols": lambda: None if fine else "python -m sglang_patches.check names the rows"
    }
    table, fine = _run(checks | _device_checks(device, model, tokens, context.args))
    console.print(table)
    raise typer.Exit(not fine)


def _device_checks(
    device: str, model: str, tokens: int, flags: list[str]
) -> dict[str, Callable[[], str | None]]:
    if device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = (
            "1"  # read when SGLang's kernels are imported, here and in the engines
        )
    from sglang_patches.check import kernels

    comparison = Comparison(model, device, tokens, flags)
    return {
        **{name: functools.partial(check, device) for name, check in kernels.CHECKS.items()},
        "plain decoding": comparison.answer_plainly,
        "tree attention (probe at start) and speculative decoding": comparison.answer_speculatively,
        "greedy output equals plain decoding's": comparison.compare,
    }


def _run(checks: dict[str, Callable[[], str | None]]) -> tuple[Table, bool]:
    """Runs each check. A check that passes returns None or a text that begins with ok; one that fails returns the reason or raises."""
    table = Table(title="specstore on this machine")
    for heading in ("check", "state", "seconds"):
        table.add_column(heading)
    fine = True
    for name, check in checks.items():
        started = time.perf_counter()
        print(f"{name} ...", file=sys.stderr)  # some take minutes, and the table comes last
        try:
            state = check() or OK
        except Exception as error:  # the table shows every check, also those after one that fails
            state = f"{type(error).__name__}: {error}"
        table.add_row(name, state, f"{time.perf_counter() - started:.1f}")
        fine = fine and state.startswith(OK)
    return table, fine


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(main)
    app(prog_name="python -m sglang_patches.check")
