"""A method added in a few lines, and the same with a deliberate fault, twice: the suite passes the first and catches the
others. A plugin of its own, which SGLang finds on the path of a server under test."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from unittest import mock

from sglang_patches.drafting.registry import Method

ACCEPT_ANYWAY = 0.3


def _chains() -> type:
    from sglang_patches.workers.sssd import SSSDWorker

    class Chains(SSSDWorker):
        """Asks the datastore for the likeliest continuation alone."""

        def __init__(self, **arguments: object) -> None:
            super().__init__(**arguments)
            self.budget = dataclasses.replace(self.budget, children=1)

    return Chains


def _leaking() -> type:
    class Leaking(_chains()):
        """Reads and writes what everybody may."""

        def __init__(self, **arguments: object) -> None:
            with mock.patch.dict(os.environ, SPECSTORE_TENANT="everybody"):
                super().__init__(**arguments)

    return Leaking


def _biased() -> type:
    from sglang_patches.workers.verification import HostTrees

    exact, draw = HostTrees.child_with_token, random.Random(1)

    def biased(trees: HostTrees, request: int, node: int, token: int) -> int:
        child = next(iter(trees.children(request, node)), -1)
        return child if child != -1 and draw.random() < ACCEPT_ANYWAY else exact(trees, request, node, token)

    class Biased(_chains()):
        """Often accepts a drafted child although the target drew another token."""

        def forward_batch_generation(self, *arguments: object, **named: object):
            with mock.patch.object(HostTrees, "child_with_token", biased):
                return super().forward_batch_generation(*arguments, **named)

    return Biased


def _method(name: str, worker: Callable[[], type]) -> Method:
    return Method(name=name, summary="a toy", worker=worker)


METHODS = {
    method.name: method
    for method in (
        _method("TOY", _chains),
        _method("TOY_LEAKING", _leaking),
        _method("TOY_BIASED", _biased),
    )
}


def register() -> None:
    from sglang_patches import plugin

    plugin.register()
    for method in METHODS.values():
        plugin.register_method(method)
