"""A server whose steps give each request its own rows: an experiment, as no server does so yet."""

from __future__ import annotations

import os
from pathlib import Path

PLUGIN = Path(__file__).with_name("plugin")


def rows_by_request() -> dict[str, str]:
    """Environment of the server, which must be on a CPU."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH", ""))))}
