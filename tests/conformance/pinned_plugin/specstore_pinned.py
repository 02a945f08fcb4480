"""Every method draws with shared noise, whose seeds follow from the requests. A plugin of its own, which SGLang finds on the path of a
server under test only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.layers.sampler import Sampler

    from sglang_patches.verification.verifier import Verifier


def register() -> None:
    from sglang_patches.methods.registry import METHODS

    for method in METHODS.values():
        object.__setattr__(method, "verifier", _pinned)  # in place: SGLang may know the method already


def _pinned(sampler: Sampler) -> Verifier:
    import specstore_pinned_parts

    return specstore_pinned_parts.Pinned(sampler)
