"""A deliberate fault for the check's test: one method emits a wrong token now and then. Put on the path of an engine under test only;
SGLang finds it as a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.layers.sampler import Sampler

    from sglang_patches.verification.verifier import Verifier

METHOD = "DUO"
EVERY = 7  # th token of a step's draws is wrong


def register() -> None:
    from sglang_patches.methods.registry import METHODS

    object.__setattr__(METHODS[METHOD], "verifier", wrong)  # in place: SGLang may know the method already


def wrong(sampler: Sampler) -> Verifier:
    from sglang_patches.verification.noise_verifier import SharedNoise

    class Wrong(SharedNoise):
        _drawn = 0

        def _target(self, *arguments):
            target = super()._target(*arguments)
            right = target.sample

            def sample(nodes):
                return [self._spoiled(token) for token in right(nodes)]

            target.sample = sample
            return target

        def _spoiled(self, token: int) -> int:
            """Another token than the drawn one, of those that end no answer."""
            self._drawn += 1
            return token if self._drawn % EVERY else max(2, token ^ 1)

    return Wrong(sampler)
