"""`python -m sglang_patches.check`: does this SGLang, and with --device this machine, do what specstore needs?"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sglang_patches.check.engines import Engines
from sglang_patches.check.parts import Part, engine_parts, in_order, kernel_parts, run
from sglang_patches.check.results import OtherRunError, Result, Results, host_table
from sglang_patches.check.setup import Setup

console = Console(width=None if sys.stdout.isatty() else 200)
# What compiles on an accelerator keeps it in these folders.
CACHES = {
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}


def main(
    context: typer.Context,
    device: Annotated[
        str | None, typer.Option(help="Check this device too: cuda or cpu. Takes minutes and needs --model.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Folder of a model that the device can hold.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the answers that are compared.")] = 100,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Every method, or the head that the flags name: also sampled, with a draft process killed, and tokens a second.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results and compiled kernels. A later call with it goes on."),
    ] = None,
) -> None:
    """Compares the symbols that the plugin touches with the installed SGLang. With --device it also runs the kernels, the
    probe of tree attention and a greedy comparison with plain decoding; further flags go to SGLang. Exits with status 1 if a check
    fails or has not run. It may be stopped: with --out it goes on another time."""
    if device is None and (everything or out):
        raise typer.BadParameter("--all and --out need --device")
    if device is None:
        table, fine = host_table()
        console.print(table)
        raise typer.Exit(not fine)
    if model is None:
        raise typer.BadParameter("--device needs --model")
    if not model.is_dir():
        raise typer.BadParameter(f"--model: {model}: no such folder")
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specstore-check-")))
        _set_environment(device, folder / "caches" if out else None)
        setup = Setup(model, device, tokens, tuple(context.args))
        if setup.lacks_head:
            raise typer.BadParameter(f"{setup.method} needs --speculative-draft-model-path")
        if everything and setup.asked_method and not setup.has_head:
            raise typer.BadParameter("--all checks every method: leave out --speculative-algorithm")
        try:
            results = Results(folder, setup.about())
        except OtherRunError as error:
            raise typer.BadParameter(f"--out: {error}") from None
        engines = stack.enter_context(Engines(folder / "logs"))
        parts = [*kernel_parts(device), *engine_parts(setup, results, engines, everything)]
        _run(parts, results)
    console.print(_table(parts, results))
    raise typer.Exit(not all(part.name in results.rows and results.rows[part.name].fine for part in parts))


def _set_environment(device: str, caches: Path | None) -> None:
    """Sets the environment of this process and of the engines. A cache that the environment names stays where it is."""
    if device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # read when SGLang's kernels are imported
    if caches is not None:
        for variable, name in CACHES.items():
            os.environ.setdefault(variable, str(caches.absolute() / name))


def _run(parts: Sequence[Part], results: Results) -> None:
    """Until all have run, or the process is told to end."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as `timeout` ends it
    try:
        for part in in_order(parts, results):
            print(
                f"{part.name} ...", file=sys.stderr, flush=True
            )  # some take minutes, and the table comes last
            run(part, results)
            if part.name in results.rows:
                print(f"    {results.rows[part.name].state}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)


def _table(parts: Sequence[Part], results: Results) -> Table:
    table = Table(title=f"specstore on {results.about['device']}")
    for heading in ("check", "state", "seconds"):
        table.add_column(heading)
    for part in parts:
        row = results.rows.get(part.name, Result("not run"))
        table.add_row(part.name, row.state, f"{row.seconds:.1f}")
    return table


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(main)
    app(prog_name="python -m sglang_patches.check")
