"""For which reasons a test may be skipped where CI is set. Any other is a failure there: what a test needs has to be installed."""

from __future__ import annotations

import os
import re

import pytest

# Begins of reasons.
ALLOWED = (
    "too long for every change",
    "shared/ is not beside the checkout",
    "../shared/compose_lab is absent",
    "a Docker engine of its own needs root",
    "this processor does not multiply",
    "arctic-inference is not installed",  # published as source only: `make peers`
    # Of tests/versions, whose environments have the SGLang that they name.
    "the fields are those of the newest version",
    "the fields and values are the newest version's",
    "earlier versions lack some of them",
    "SGLang 0.5.17 does not show them there",
    "SGLang before 0.5.23 answers no chat of Ollama's without a stream",
    "SGLang 0.5.17 hands out no hidden states",
    "SGLang has no watermarks",
    # Of EAGLE3, as SGLang serves it.
    "SGLang loads the target's weights into the head too",
    "SGLang tells the states that the head reads",
)


def refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Makes a skip a failure, in CI, unless its reason is allowed. Of a test that is expected to fail, nothing."""
    if "CI" not in os.environ or not report.skipped or hasattr(report, "wasxfail"):
        return
    _, _, reason = report.longrepr
    reason = reason.removeprefix("Skipped: ")
    if not any(re.match(allowed, reason) for allowed in ALLOWED):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, and not for a reason that tests/skips.py allows: {reason}"
