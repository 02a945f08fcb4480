"""Puts a process that lies in the place of every draft process. A plugin of its own, which SGLang finds on the path of a server under
test only."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_patches.drafting.seams import DraftChannel
    from sglang_patches.methods.registry import Method, Parts, Surroundings


def register() -> None:
    from sglang_patches.methods.registry import METHODS

    for method in METHODS.values():
        if method.draft_process:
            _lie(method)


def _lie(method: Method) -> None:
    """In place: SGLang may know the method already."""
    honest = method.parts

    def parts(around: Surroundings) -> Parts:
        return honest(dataclasses.replace(around, start_draft=_start))

    object.__setattr__(method, "parts", parts)


def _start() -> DraftChannel:
    # Only when a worker is made: SGLang's metrics have to be set up before `prometheus_client` is imported.
    from tests.conformance.drafts import start_liar
    from tests.support.tiny_model import SPELLING_VOCABULARY

    return start_liar(SPELLING_VOCABULARY)
