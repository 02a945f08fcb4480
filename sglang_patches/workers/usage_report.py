"""What decoding took, in a request's `meta_info`, as SGLang shows it.

`specstore` is the request's `Usage.summary`. SGLang's `spec_num_proposed_drafts` and `spec_accept_rate`, which count the widest tree in
every step, become those of the verified nodes; the OpenAI endpoints show them in `sglext.spec_tokens_details`
(`return_spec_tokens_details`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_patches import hooks
from sglang_patches.drafting.requests import USAGE

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

SUMMARY = "specstore"


def _after_streamer_class(
    result: type[SchedulerOutputStreamer], scheduler: Scheduler
) -> type[SchedulerOutputStreamer]:
    if scheduler.rust_server is not None:
        logger.warning(
            "specstore: SGLang's Rust server takes no further fields: meta_info has no `specstore`"
        )
        return result
    return _telling(result)


def _telling(base: type[SchedulerOutputStreamer]) -> type[SchedulerOutputStreamer]:
    def told(self: SchedulerOutputStreamer, reqs: list[Req]) -> dict[str, list]:
        return base.build_additional_customized_info(self, reqs) | fields_of(reqs)

    # The base is a dataclass with slots, which finds its own fields in any subclass.
    return type(
        f"{base.__name__}WithUsage",
        (base,),
        {
            "__slots__": (),
            "has_additional_customized_info": True,
            "build_additional_customized_info": told,
        },
    )


def fields_of(reqs: Sequence[Req]) -> dict[str, list]:
    """Of the requests of one message to the detokenizer: a list for each, empty for those that go on."""
    summaries = [_summary(req) if req.finished() else [] for req in reqs]
    return {SUMMARY: summaries} if any(summaries) else {}


def _summary(req: Req) -> list[dict]:
    usage = getattr(req, USAGE, None)
    return [] if usage is None else [usage.summary(len(req.output_ids_through_stop))]


def _around_meta_info(
    original: Callable,
    manager: TokenizerManager,
    meta_info: dict[str, Any],
    state: object,
    customized_info: dict[str, list],
    index: int,
    finish_reason: dict | None,
) -> None:
    """SGLang takes the other fields for lists with an entry a token, which it joins and cuts."""
    others = {name: values for name, values in customized_info.items() if name != SUMMARY}
    original(manager, meta_info, state, others, index, finish_reason)
    for summary in customized_info.get(SUMMARY, {index: ()})[index]:
        meta_info[SUMMARY] = summary


def _after_metrics(result: None, manager: TokenizerManager, meta_info: dict[str, Any], *_: object) -> None:
    """Called for the last message of a request."""
    if SUMMARY in meta_info and "spec_num_proposed_drafts" in meta_info:
        drafted = sum(meta_info[SUMMARY]["drafted"].values())
        correct = meta_info["spec_num_correct_drafts"]
        meta_info["spec_num_proposed_drafts"] = drafted
        meta_info["spec_accept_rate"] = correct / drafted if drafted else 0.0


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
SCHEDULER_HOOKS: dict[str, Callable] = {
    "sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class": _after_streamer_class,
}
MANAGER_HOOKS: dict[HookType, dict[str, Callable]] = {
    HookType.AROUND: {_MANAGER + "update_request_meta_info": _around_meta_info},
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
