"""What an answer, SGLang's log and its metrics say of decoding.

- In a request's `meta_info`, `specstore` is its `Usage.summary`. SGLang's `spec_num_proposed_drafts` and `spec_accept_rate`, which count
  the widest tree in every step, become those of the verified nodes; the OpenAI endpoints show them in `sglext.spec_tokens_details`
  (`return_spec_tokens_details`).
- SGLang's log line (`accept rate`) and its gauge `sglang:spec_accept_rate` divide the accepted tokens of an interval by its forwards
  times the nodes of the widest tree. The length of our trees varies, so the accepted tokens are scaled until this quotient is right.
- The last message of a stream of SGLang's Ollama interface has no text: what the last step said is lost. With plain decoding that is a
  token, with accepted runs it may be half of the answer. Here an answer's last text comes in a message of its own, before the one that
  ends the stream.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_spec

from sglang_patches.host import hooks
from sglang_patches.host.versions import INSTALLED, host
from sglang_patches.ledger.requests import USAGE
from sglang_patches.ledger.usage import SUMMARY

if TYPE_CHECKING:
    from sglang.srt.entrypoints.ollama.serving import OllamaServing
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

INTERVAL = "specstore_interval"  # attribute of SGLang's reporter
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager."
_SERVING = "sglang.srt.entrypoints.ollama.serving.OllamaServing."


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


@dataclass
class Interval:
    """Between two log lines of SGLang. begun, verified: drafted tokens verified in this process until it began, and until now.
    accepted: of them in the interval."""

    begun: int = 0
    verified: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """The last steps of an interval may be counted on one side alone, as SGLang counts later."""
        drafted = self.verified - self.begun
        return min(1.0, self.accepted / drafted) if drafted else 0.0


def _after_update(
    result: None, reporter: SchedulerMetricsReporter, bs: int, num_correct_drafts: int, **_: int
) -> None:
    """Called once a step of `bs` requests."""
    # Not above: the process that answers requests imports this module before SGLang has set up its metrics, which then would be lost.
    from sglang_patches.ledger import verified

    interval = getattr(reporter, INTERVAL, None) or Interval()
    if reporter.spec_num_forward_ct == bs:  # SGLang has begun anew
        interval = Interval(begun=interval.verified)
    interval.verified = verified.total()
    interval.accepted += num_correct_drafts
    setattr(reporter, INTERVAL, interval)
    widest = get_spec().speculative_num_draft_tokens - 1
    reporter.spec_num_correct_drafts = interval.rate * reporter.spec_num_forward_ct * widest


class _TextBeforeEnd:
    """A tokenizer manager, as far as the interface uses it, that tells the end of an answer after its text."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    async def generate_request(self, *request: Any) -> AsyncIterator[dict[str, Any]]:
        async for message in self._manager.generate_request(*request):
            if message["meta_info"]["finish_reason"] is not None:
                yield message | {"meta_info": message["meta_info"] | {"finish_reason": None}}
            yield message


async def _around_stream(original: Callable, serving: OllamaServing, *request: Any) -> object:
    told = copy.copy(serving)
    told.tokenizer_manager = _TextBeforeEnd(serving.tokenizer_manager)
    return await original(told, *request)


# Elsewhere both of SGLang's figures are made of one count: the rate cannot be mended without spoiling the length.
_RATE = {host.ACCEPT_RATE: _after_update} if host.COUNTS_CORRECT_DRAFTS else {}
SCHEDULER_HOOKS: hooks.ByKind = {HookType.AFTER: {host.STREAMER: host.teller(SUMMARY, summary_of)} | _RATE}
ENTRY_HOOKS: hooks.ByKind = {
    HookType.AROUND: host.meta_info_hooks(SUMMARY)
    | {_SERVING + name: _around_stream for name in ("_stream_chat_response", "_stream_generate_response")},
    HookType.AFTER: {_MANAGER + "_calculate_spec_decoding_metrics": _after_metrics},
}


def register_in_scheduler() -> None:
    """For the scheduler's process, as `hooks.apply`."""
    if not _RATE:
        logger.warning(
            "SGLang %s reports an acceptance rate (log, sglang:spec_accept_rate) of the widest tree, not of the verified tokens",
            INSTALLED,
        )
    hooks.apply(SCHEDULER_HOOKS)


def register_in_entry() -> None:
    """For the process that answers requests."""
    hooks.apply(ENTRY_HOOKS)
