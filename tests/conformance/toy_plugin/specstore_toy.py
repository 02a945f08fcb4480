"""A method added in a few lines, one with a draft side, and these with a deliberate fault each: the suite passes the first two and
catches the others. A plugin of its own, which SGLang finds on the path of a server under test."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from sglang_patches.methods.registry import Method, Parts, Surroundings

if TYPE_CHECKING:
    from sglang.srt.layers.sampler import Sampler

    from sglang_patches.verification.verifier import Verifier


def chains(around: Surroundings) -> Parts:
    import specstore_toy_parts

    return specstore_toy_parts.chains(around)


def drafted(around: Surroundings) -> Parts:
    import specstore_toy_parts

    return specstore_toy_parts.drafted(around)


def leaking(around: Surroundings) -> Parts:
    import specstore_toy_parts

    return specstore_toy_parts.leaking(around)


def biased(sampler: Sampler) -> Verifier:
    import specstore_toy_parts

    return specstore_toy_parts.Biased(sampler)


def cooled(sampler: Sampler) -> Verifier:
    import specstore_toy_parts

    return specstore_toy_parts.Cooled(sampler, random.Random(1))


def eager(sampler: Sampler) -> Verifier:
    import specstore_toy_parts

    return specstore_toy_parts.Eager(sampler, random.Random(1))


METHODS = {
    method.name: method
    for method in (
        Method(name="TOY", summary="a toy", parts=chains),
        Method(name="TOY_DRAFTED", summary="a toy with a draft side", parts=drafted),
        Method(name="TOY_LEAKING", summary="a toy with a fault", parts=leaking),
        Method(name="TOY_BIASED", summary="a toy with a fault", parts=chains, verifier=biased),
        Method(name="TOY_COOLED", summary="a toy with a fault", parts=drafted, verifier=cooled),
        Method(name="TOY_EAGER", summary="a toy with a fault", parts=drafted, verifier=eager),
    )
}


def register() -> None:
    from sglang_patches import plugin

    plugin.register()
    for method in METHODS.values():
        plugin.register_method(method)
