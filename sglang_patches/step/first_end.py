"""An accepted run is cut at the first token that ends its request, as plain decoding would have ended it.

Plain decoding judges its answer after each token. SGLang judges a run of accepted tokens as a whole: of two conditions that hold
in the run, the one that is checked first wins, wherever it stands. So the runs are cut before SGLang counts them. What a cut run
then brings is plain decoding's: the answer, its finish reason, its usage and its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_patches.host import hooks

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.managers.utils import GenerationBatchResult

_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
RUNS = _PROCESSOR + "_resolve_spec_v2_tokens"
GRAMMARS = _PROCESSOR + "advance_grammar_fsm"
JUDGE = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
CUT = "specstore_cut"  # attribute of a result whose runs are cut


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


HOOKS: dict[HookType, dict[str, Callable]] = {
    HookType.BEFORE: {GRAMMARS: _before_grammars, RUNS: _before_runs},
    HookType.AROUND: {JUDGE: _around_judge},
}
HOOKED = (GRAMMARS, RUNS, JUDGE)


def register_first_end() -> None:
    """For the scheduler's process, as `finish_hooks.register_finish_hooks`."""
    for kind, wanted in HOOKS.items():
        hooks.register(wanted, kind)
    hooks.refuse_if_left_out()
    HookRegistry.apply_hooks()
