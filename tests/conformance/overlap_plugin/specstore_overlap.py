"""Heads under overlap scheduling on a CPU, where SGLang switches it off for them: a kernel of it is for GPUs alone. Torch's indexing
stands in for that. A plugin of its own, which SGLang finds on the path of a server under test only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookType

    from sglang_patches.host import hooks

    handling = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.handle_server_args"
    hooks.register({handling: _overlap}, HookType.AFTER)
    hooks.register({"sglang.srt.managers.overlap_utils.gather_spec_extras": _gather}, HookType.AROUND)


def _overlap(result: None, algorithm: SpeculativeAlgorithm, server_args: ServerArgs) -> None:
    from sglang_patches.host.versions import host
    from sglang_patches.methods.registry import HEADS

    if algorithm.name in HEADS and not server_args._raw_input["disable_overlap_schedule"]:
        host.declare(server_args, disable_overlap_schedule=False)


def _gather(
    stock: Callable, indices: torch.Tensor, *buffers: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if buffer is None else buffer[indices] for buffer in buffers)
