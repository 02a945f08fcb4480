"""`python -m sglang_patches.check`: the host-symbol table against the installed SGLang; exits 1 on drift."""

from __future__ import annotations

import sys
from importlib.metadata import version

from rich.console import Console
from rich.table import Table

from sglang_patches.host_api import SUPPORTED_SGLANG, check_host


def main() -> int:
    table = Table(title=f"SGLang {version('sglang')} (supported: {SUPPORTED_SGLANG})")
    for heading in ("symbol", "state", "used for"):
        table.add_column(heading)
    rows = check_host()
    for symbol, drift in rows:
        table.add_row(symbol.path, drift or "ok", symbol.why)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    return int(any(drift for _, drift in rows))


if __name__ == "__main__":
    sys.exit(main())
