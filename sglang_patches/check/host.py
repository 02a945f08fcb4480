"""The host-symbol table against the installed SGLang."""

from __future__ import annotations

from rich.table import Table

from sglang_patches.host.symbols import check_host
from sglang_patches.host.versions import INSTALLED, TESTED


def host_table() -> tuple[Table, bool]:
    """The table, and whether every row is as expected."""
    table = Table(title=f"SGLang {INSTALLED} (tested: {', '.join(TESTED)})")
    for heading in ("symbol", "state", "used for"):
        table.add_column(heading)
    rows = check_host()
    for symbol, drift in rows:
        table.add_row(symbol.path, drift or "ok", symbol.why)
    return table, not any(drift for _, drift in rows)
