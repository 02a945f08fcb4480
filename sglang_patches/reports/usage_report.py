"""What decoding took, in a request's `meta_info`, as SGLang shows it.

`specstore` is the request's `Usage.summary`. SGLang's `spec_num_proposed_drafts` and `spec_accept_rate`, which count the widest tree in
every step, become those of the verified nodes; the OpenAI endpoints show them in `sglext.spec_tokens_details`
(`return_spec_tokens_details`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_patches.host import hooks
from sglang_patches.host.versions import host
from sglang_patches.ledger.requests import USAGE

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

SUMMARY = "specstore"


def summary_of(req: Req) -> list[dict]:
    """One summary for a request that has finished, none for one that goes on."""
    usage = getattr(req, USAGE, None)
    return [usage.summary(len(req.output_ids_through_stop))] if req.finished() and usage is not None else []


def _after_metrics(
    result: None, manager: TokenizerManager, meta_info: dict[str, Any], message: Any, index: int
) -> None:
    """Called for the last message of a request."""
    host.put_told(SUMMARY, meta_info, message, index)
    if SUMMARY in meta_info and "spec_num_proposed_drafts" in meta_info:
        drafted = sum(meta_info[SUMMARY]["drafted"].values())
        correct = meta_info["spec_num_correct_drafts"]
        meta_info["spec_num_proposed_drafts"] = drafted
        meta_info["spec_accept_rate"] = correct / drafted if drafted else 0.0


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
SCHEDULER_HOOKS: dict[str, Callable] = {host.STREAMER: host.teller(SUMMARY, summary_of)}
MANAGER_HOOKS: dict[HookType, dict[str, Callable]] = {
    HookType.AROUND: host.meta_info_hooks(SUMMARY),
    HookType.AFTER: {_MANAGER + "_calculate_spec_decoding_metrics": _after_metrics},
}


def register_streamer() -> None:
    """For the scheduler's process, as `finish_hooks.register_finish_hooks`."""
    hooks.register(SCHEDULER_HOOKS, HookType.AFTER)
    hooks.refuse_if_left_out()
    HookRegistry.apply_hooks()


def register_metrics() -> None:
    """For the process that answers requests."""
    for kind, wanted in MANAGER_HOOKS.items():
        hooks.register(wanted, kind)
    hooks.refuse_if_left_out()
    HookRegistry.apply_hooks()
