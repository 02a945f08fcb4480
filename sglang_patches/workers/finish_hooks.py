"""Requests that end outside a decode step: SGLang tells workers of the ends that a decode step brings, and of no others.

A request with max_tokens=1 ends at prefill: a health check, say. A retracted request whose client has left ends when it returns to
the batch. A request whose client leaves while it waits ends then. All of them may have a session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_patches import hooks

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor


def _after_abort(result: None, scheduler: Scheduler, abort_req: AbortReq, req: Req) -> None:
    scheduler.draft_worker.note_request_finished(rid=req.rid, natural_stop=False)


def _after_batch(
    result: None, processor: SchedulerBatchResultProcessor, batch: ScheduleBatch, *_: object
) -> None:
    for req in batch.reqs:
        if req.finished():
            processor.draft_worker.note_request_finished(rid=req.rid, natural_stop=False)


_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
HOOKS: dict[str, Callable] = {
    "sglang.srt.managers.scheduler.Scheduler.send_abort_output": _after_abort,
    _PROCESSOR + "process_batch_result_prefill": _after_batch,
    # A decode instance's batch of requests that were prefilled elsewhere, or retracted and back.
    _PROCESSOR + "process_batch_result_prebuilt": _after_batch,
}


def register_finish_hooks() -> None:
    """Hooks SGLang's scheduler, once however often it is called. For the scheduler's process alone, which has imported those
    modules already; elsewhere the hooks would import them. Raises RuntimeError where another plugin's hook keeps one out."""
    hooks.register(HOOKS, HookType.AFTER)
    hooks.refuse_if_left_out()
    HookRegistry.apply_hooks()
