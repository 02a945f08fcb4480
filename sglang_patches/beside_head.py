"""SGLang's own algorithm of a model's head, with retrieval beside it.

The operator keeps SGLang's name and flags of the algorithm: SGLang compares these names in many places, and so do routers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.plugins.hook_registry import HookType

from sglang_patches.algorithm import refuse_settings, register_around
from sglang_patches.host import hooks
from sglang_patches.host.symbols import refuse_drift
from sglang_patches.host.versions import INSTALLED, host
from sglang_patches.methods.registry import HEADS, Method
from sglang_patches.options import load_options
from sglang_patches.start import tree_attention

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

FLAG = "--specstore-beside-head"
_ALGORITHM = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm."
# Settings of SGLang's heads, and the one value that their trees can be united with.
_SUPPORTED = {
    "speculative_adaptive": False,
    "speculative_use_block_verification": False,
    "speculative_use_rejection_sampling": False,
    # The target's own draws decide, never a threshold.
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
    "enable_multi_layer_eagle": False,
    "enable_mixed_chunk": False,
    "disaggregation_mode": "null",
}


def register(worker_class: Callable[[Method], type]) -> None:
    """Registers the hooks that put retrieval beside a head.

    worker_class: makes the scheduler's process ready and returns the class of its worker.
    """

    def around_handling(original: Callable, algorithm: SpeculativeAlgorithm, server_args: ServerArgs) -> None:
        asked = load_options().beside_head == "on"
        if asked:
            _refuse_others(algorithm.name)  # before SGLang asks for flags that would not help
        original(algorithm, server_args)
        if asked:
            _resolve(algorithm.name, server_args)

    def around_worker(original: Callable, algorithm: SpeculativeAlgorithm, server_args: ServerArgs) -> type:
        if load_options().beside_head == "on":
            return worker_class(HEADS[algorithm.name])
        return original(algorithm, server_args)

    around = {"handle_server_args": around_handling, "create_worker": around_worker}
    hooks.register({_ALGORITHM + name: hook for name, hook in around.items()}, HookType.AROUND)


def _refuse_others(algorithm: str) -> None:
    if algorithm not in HEADS:
        raise ValueError(
            f"{FLAG}: --speculative-algorithm {algorithm} is not supported, only {', '.join(HEADS)}"
        )
    if not host.HEADS:
        raise ValueError(f"{FLAG}: SGLang {INSTALLED} has no place for it")


def _resolve(algorithm: str, server_args: ServerArgs) -> None:
    """Refuses settings that cannot work, by name, and widens the verified tree. SGLang has resolved the head's settings."""
    refuse_drift()
    load_options().access()
    refuse_settings(f"{algorithm} with {FLAG}", server_args, _SUPPORTED)
    register_around(server_args, verifies=True)
    resolved = resolved_view(server_args)
    if resolved.speculative_eagle_topk > 1:  # else chains will do, which any backend of a head verifies
        host.declare(server_args, **tree_attention.choose(algorithm, server_args))
    own = resolved.speculative_num_draft_tokens
    host.declare(server_args, speculative_num_draft_tokens=max(own, load_options().nodes + 1))
