"""The methods. `plugin.py` registers with SGLang what stands here; nothing else names a method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """name: its value of `--speculative-algorithm`. summary: what it does, in a line. worker: imports and returns the class
    that decodes."""

    name: str
    summary: str
    worker: Callable[[], type]


def _sssd() -> type:
    from sglang_patches.workers.sssd import SSSDWorker

    return SSSDWorker


METHODS = {
    method.name: method
    for method in (
        Method(
            name="SSSD",
            summary="the datastore drafts: what follows the same n-grams in the session and the stored texts",
            worker=_sssd,
        ),
    )
}
