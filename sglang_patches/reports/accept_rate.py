"""SGLang's acceptance rate, of the tokens that were verified.

Its log line (`accept rate`) and its gauge `sglang:spec_accept_rate` divide the accepted tokens of an interval by its forwards times
the nodes of the widest tree. The length of our trees varies, so the accepted tokens are scaled until this quotient is right.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_spec

from sglang_patches.host import hooks
from sglang_patches.host.versions import INSTALLED, host

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter

logger = logging.getLogger(__name__)

INTERVAL = "specstore_interval"  # attribute of SGLang's reporter


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


# Elsewhere both of SGLang's figures are made of one count: the rate cannot be mended without spoiling the length.
HOOKS = {host.ACCEPT_RATE: _after_update} if host.COUNTS_CORRECT_DRAFTS else {}


def register_accept_rate() -> None:
    """For the scheduler's process, as `finish_hooks.register_finish_hooks`."""
    if not HOOKS:
        logger.warning(
            "SGLang %s reports an acceptance rate (log, sglang:spec_accept_rate) of the widest tree, not of the verified tokens",
            INSTALLED,
        )
    hooks.register(HOOKS, HookType.AFTER)
    hooks.refuse_if_left_out()
    HookRegistry.apply_hooks()
