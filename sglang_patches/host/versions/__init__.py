"""What differs between the versions of SGLang that the plugin runs on: a module for each, chosen once at import.

The newest version's module has the rows of the host table that are not the same everywhere, and the functions behind them. Each
other module has what differs from the newest. They import SGLang only where one of the functions is asked for, so the table can be
checked first.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from types import ModuleType

from packaging.version import Version

# Oldest first: the two newest, and the one that has run on a GPU.
TESTED = ("0.5.17", "0.5.22", "0.5.23")
INSTALLED = version("sglang")


def nearest(installed: str) -> str:
    """The newest tested version that is not newer; the oldest tested one where all are."""
    return max(
        (tested for tested in TESTED if Version(tested) <= Version(installed)), key=Version, default=TESTED[0]
    )


def module_of(tested: str) -> ModuleType:
    """What differs in a tested version."""
    return import_module(f"{__name__}.v{tested.replace('.', '_')}")


host = module_of(nearest(INSTALLED))
