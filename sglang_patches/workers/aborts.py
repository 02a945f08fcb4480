"""Requests that end while they wait: SGLang tells workers of the ends that a step brings, and of no others.

A request that was retracted from the batch, say, still has its session when its client leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

_ENDED_WHILE_WAITING = "sglang.srt.managers.scheduler.Scheduler.send_abort_output"


def tell_worker_of_aborts() -> None:
    """Hooks SGLang's scheduler, once however often it is called. For the scheduler's process alone, which has imported that
    module already; elsewhere the hook would import it."""
    HookRegistry.register(_ENDED_WHILE_WAITING, _after_abort, HookType.AFTER)
    HookRegistry.apply_hooks()


def _after_abort(result: None, scheduler: Scheduler, abort_req: AbortReq, req: Req) -> None:
    scheduler.draft_worker.note_request_finished(rid=req.rid, natural_stop=False)
