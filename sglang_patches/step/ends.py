"""The ends of requests, and who hears of them.

An accepted run is cut at the first token that ends its request, as plain decoding would have ended it. Plain decoding judges its answer
after each token. SGLang judges a run of accepted tokens as a whole: of two conditions that hold in the run, the one that is checked first
wins, wherever it stands. So the runs are cut before SGLang counts them. What a cut run then brings is plain decoding's: the answer, its
finish reason, its usage and its stream.

SGLang tells workers of the ends that a decode step brings, and of no others. A request with max_tokens=1 ends at prefill: a health check,
say. A retracted request whose client has left ends when it returns to the batch. A request whose client leaves while it waits ends then.
All of them may have a session.

A request with max_new_tokens=0 wants its prompt read and nothing said, to score texts for example. SGLang has a path of its own for them,
and turns it off under any speculation, because some methods draft in a prefill. Without it such a request is answered with the
log-probability of a token that it did not ask for, and not with those at the places that it names.

A grammar may allow no token: its text cannot be written with the model's vocabulary, or min_new_tokens forbids its end. SGLang ends such a
request with an error once it has a token that the grammar refuses, but to draw one from nothing ends the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.plugins.hook_registry import HookType

from sglang_patches.host import hooks
from sglang_patches.host.versions import host

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.session.session_controller import SessionReqNode

    from sglang_patches.step.decode import DecodeWorker

_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
RUNS = _PROCESSOR + "_resolve_spec_v2_tokens"
GRAMMARS = _PROCESSOR + "advance_grammar_fsm"
JUDGE = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
CLEAR = "sglang.srt.session.session_controller.SessionReqNode.clear"
BIAS = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.apply_logits_bias"
CUT = "specstore_cut"  # attribute of a result whose runs are cut

_told: DecodeWorker  # once there is one


def tokens_through_end(req: Req, run: Sequence[int]) -> int:
    """How many tokens of the run plain decoding emits: all, or those through the first that ends the request.

    req: without the run, and not changed. Its grammar is left out: it is asked of the tokens that are left.
    """
    settled, grammar = len(req.output_ids), req.grammar
    state = req.finished_reason, req.finished_len, req.to_finish
    req.grammar = None
    try:
        for count, token in enumerate(run[:-1], start=1):
            req.output_ids.append(token)
            req.update_finish_state(1)
            if req.finished():
                return count
        return len(run)
    finally:
        del req.output_ids[settled:]
        req.grammar = grammar
        req.finished_reason, req.finished_len, req.to_finish = state


def _before_grammars(
    processor: SchedulerBatchResultProcessor, result: GenerationBatchResult, batch: ScheduleBatch
) -> None:
    """A head's next step may ask for the grammars' states before the scheduler has processed this one's result."""
    if batch.is_prefill_only:  # its tokens stand for none
        result.grammar_advanced = True
        return
    if result.accept_lens is None or not batch.forward_mode.is_decode() or hasattr(result, CUT):
        return
    if result.copy_done is not None:
        result.copy_done.synchronize()
    width = result.speculative_num_draft_tokens
    tokens, lens = result.next_token_ids.view(-1, width).tolist(), result.accept_lens.tolist()
    kept = [
        length if req.finished() or req.is_retracted else tokens_through_end(req, row[:length])
        for req, row, length in zip(batch.reqs, tokens, lens, strict=True)
    ]
    _cut(result, lens, kept)
    setattr(result, CUT, True)


def _before_runs(
    processor: SchedulerBatchResultProcessor, result: GenerationBatchResult, batch: ScheduleBatch
) -> None:
    # A grammar that ends before, where the request ignores the end token, cuts the run as well; SGLang would count the rest of it.
    processor.advance_grammar_fsm(result, batch)
    if result.grammar_retained_tokens is not None:
        kept = result.accept_lens.tolist()
        runs = zip(kept, result.grammar_retained_tokens, strict=True)
        _cut(result, kept, [length if run is None else max(len(run), 1) for length, run in runs])


def _cut(result: GenerationBatchResult, before: list[int], lengths: list[int]) -> None:
    if lengths != before:
        # A new tensor: on a CPU the next step's draft input has the old one.
        result.accept_lens = torch.tensor(lengths, dtype=result.accept_lens.dtype)


def _around_judge(judge: Callable, req: Req, new_accepted_len: int = 1) -> None:
    """A cut run can end with its last token alone."""
    judge(req, min(new_accepted_len, 1))


def _after_bias(result: None, info: SamplingBatchInfo, logits: torch.Tensor) -> None:
    """Lets any token be drawn where the grammar allows none: it refuses that, which ends the request."""
    if info.grammar_mask is not None:
        logits.masked_fill_(logits.amax(dim=-1, keepdim=True) == float("-inf"), 0.0)


def _around_clear(clear: Callable, node: SessionReqNode, nodes: dict[str, SessionReqNode]) -> None:
    """Clears a request of an open session of SGLang. A client may have given its `rid` to another of the session, which was cleared
    first: SGLang would miss it."""
    nodes.setdefault(node.req.rid, node)
    clear(node, nodes)


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


HOOKS: hooks.ByKind = {
    HookType.BEFORE: {GRAMMARS: _before_grammars, RUNS: _before_runs},
    HookType.AROUND: {JUDGE: _around_judge, CLEAR: _around_clear},
    HookType.AFTER: {
        host.ABORT: _after_abort,
        BIAS: _after_bias,
        _PROCESSOR + "process_batch_result_prefill": _after_batch,
        # A decode instance's batch of requests that were prefilled elsewhere, or retracted and back.
        _PROCESSOR + "process_batch_result_prebuilt": _after_batch,
        **host.SCHEDULER_HOOKS,
    },
}


def register_ends() -> None:
    """For the scheduler's process, as `hooks.apply`."""
    hooks.apply(HOOKS)
    # A hook of SGLang's registry would make a function of the property.
    Req.is_prefill_only = property(lambda req: req.sampling_params.max_new_tokens == 0)
