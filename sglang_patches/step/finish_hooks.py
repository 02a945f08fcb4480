"""Requests that end outside a decode step: SGLang tells workers of the ends that a decode step brings, and of no others.

A request with max_tokens=1 ends at prefill: a health check, say. A retracted request whose client has left ends when it returns to
the batch. A request whose client leaves while it waits ends then. All of them may have a session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_patches.host import hooks
from sglang_patches.host.versions import host

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

    from sglang_patches.step.decode import DecodeWorker

_told: DecodeWorker  # once there is one


def tell(worker: DecodeWorker) -> None:
    """This process's worker hears of aborts."""
    global _told
    _told = worker


def _after_abort(result: object, *call: Any, **named: Any) -> None:
    req = host.aborted(*call, **named)
    if req is not None:
        _told.request_ended(req)


def _after_batch(
    result: None, processor: SchedulerBatchResultProcessor, batch: ScheduleBatch, *_: object
) -> None:
    for req in batch.reqs:
        if req.finished():
            processor.draft_worker.request_ended(req)


_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
HOOKS: dict[str, Callable] = {
    host.ABORT: _after_abort,
    _PROCESSOR + "process_batch_result_prefill": _after_batch,
    # A decode instance's batch of requests that were prefilled elsewhere, or retracted and back.
    _PROCESSOR + "process_batch_result_prebuilt": _after_batch,
    **host.SCHEDULER_HOOKS,
}


def register_finish_hooks() -> None:
    """Hooks SGLang's scheduler, once however often it is called. For the scheduler's process alone, which has imported those
    modules already; elsewhere the hooks would import them. Raises RuntimeError where another plugin's hook keeps one out."""
    hooks.register(HOOKS, HookType.AFTER)
    hooks.refuse_if_left_out()
    HookRegistry.apply_hooks()
