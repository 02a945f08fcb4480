"""Gives each request of a step its own rows. A plugin of its own, which SGLang finds on the path of a measured server only."""

from __future__ import annotations


def register() -> None:
    from sglang_patches.step.length import LengthPolicy

    class ByRequest(LengthPolicy):
        def __init__(self, widths, *cost) -> None:
            super().__init__(widths, *cost, by_request=len(widths) > 1)

    from sglang_patches.step import widths

    widths.LengthPolicy = ByRequest
