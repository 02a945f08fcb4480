"""SGLang's acceptance rate, through its own reporter's function, hooked."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context  # noqa: E402

from sglang_patches.ledger import verified  # noqa: E402
from sglang_patches.reports import register_in_scheduler  # noqa: E402
from tests.unit.plugin.resolution import server_args  # noqa: E402

NODES = 7


@pytest.fixture
def reporter(plugin, model_path, monkeypatch):
    """SGLang's, as far as the function looks at it."""
    monkeypatch.setenv("SPECSTORE_NODES", str(NODES))
    publish(server_args(model_path("dense"), "ampere"), role="scheduler", ranks=SpawnRanks(0, 0))
    register_in_scheduler()
    monkeypatch.setattr(verified, "total", lambda: 0)  # other tests have counted
    yield anew(SimpleNamespace(spec_num_block_accept_tokens=0, spec_num_cap_tokens=0))
    reset_context()


def anew(reporter):
    """As SGLang begins an interval."""
    reporter.spec_num_accept_tokens = reporter.spec_num_correct_drafts = reporter.spec_num_forward_ct = 0
    return reporter


def step(reporter, monkeypatch, requests: int, drafted: int, accepted: int) -> None:
    before = verified.total()
    monkeypatch.setattr(verified, "total", lambda: before + drafted)
    SchedulerMetricsReporter.update_spec_metrics(
        reporter, requests, accepted, num_accept_tokens=accepted + requests
    )


def rate(reporter) -> float:
    """As SGLang's log line computes it."""
    return reporter.spec_num_correct_drafts / (reporter.spec_num_forward_ct * NODES)


def test_the_rate_is_of_verified_tokens(reporter, monkeypatch):
    step(reporter, monkeypatch, 2, 10, 4)
    step(reporter, monkeypatch, 1, 2, 2)
    assert rate(reporter) == pytest.approx(6 / 12)
    assert reporter.spec_num_accept_tokens == 9 and reporter.spec_num_forward_ct == 3


def test_an_interval_begins_with_sglang_s(reporter, monkeypatch):
    step(reporter, monkeypatch, 2, 100, 4)
    anew(reporter)
    step(reporter, monkeypatch, 2, 4, 3)
    assert rate(reporter) == pytest.approx(3 / 4)


def test_nothing_drafted_has_no_rate(reporter, monkeypatch):
    step(reporter, monkeypatch, 3, 0, 0)
    assert rate(reporter) == 0


def test_a_step_that_is_counted_later_does_not_pass_one(reporter, monkeypatch):
    step(reporter, monkeypatch, 1, 2, 5)
    assert rate(reporter) == 1
