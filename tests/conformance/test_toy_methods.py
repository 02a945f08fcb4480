"""The suite itself: a method that is added passes it, one with a fault does not."""

from __future__ import annotations

from pathlib import Path

import pytest

TOYS = Path(__file__).parent / "toy_plugin" / "specstore_toy.py"
SAMPLING = Path(__file__).parent / "test_sampling.py"
IN_PROCESS = Path(__file__).parent / "test_in_process.py"


class Reports:
    """Of a nested run: the tests by what became of them, without their parameters."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        if report.failed:
            self.failed.append(name)
        elif report.when == "call" and report.passed:
            self.passed.append(name)


def _run(method: str, tests: Path, *words: str) -> Reports:
    """The suite's tests of one toy, in this process."""
    reports = Reports()
    words = [str(tests), "--method-plugin", str(TOYS), "--method", method, "-q", "-W", "ignore", *words]
    pytest.main(words, [reports])
    return reports


def test_a_method_added_in_a_few_lines_passes():
    reports = _run("TOY", IN_PROCESS)
    assert reports.failed == [] and len(reports.passed) > 30


def test_a_method_with_a_draft_side_passes():
    reports = _run("TOY_DRAFTED", IN_PROCESS)
    assert reports.failed == [] and len(reports.passed) > 30


def test_a_method_that_drafts_from_a_wrong_tenant_is_caught():
    reports = _run("TOY_LEAKING", IN_PROCESS, "-k", "tenant or greedy")
    assert set(reports.failed) == {
        "test_text_is_drafted_for_its_own_tenant_alone",
        "test_text_is_drafted_for_its_own_tenant_alone_in_one_worker",
    }
    assert reports.passed


def test_a_method_that_accepts_a_wrong_token_is_caught():
    reports = _run("TOY_BIASED", IN_PROCESS, "-k", "greedy or seeds or temperature")
    assert set(reports.failed) == {
        "test_greedy_output_is_plain_decodings",
        "test_sampled_output_has_plain_decodings_distribution",
        "test_requests_with_seeds_get_plain_decodings_tokens",
        "test_requests_with_seeds_and_several_filters_in_one_batch",
    }


@pytest.mark.parametrize("toy", ["TOY_COOLED", "TOY_EAGER"])
def test_a_small_bias_of_sampled_tokens_is_caught(toy):
    """Noise of nine tenths of its size; one drafted token in ten taken for the target's own."""
    reports = _run(toy, IN_PROCESS, "-k", "temperature and synchronous and distribution and not top-p")
    assert reports.failed == ["test_sampled_output_has_plain_decodings_distribution"] and not reports.passed


@pytest.mark.long
def test_a_method_added_in_a_few_lines_passes_with_servers():
    reports = _run("TOY", Path(__file__).parent, "--ignore", __file__)
    assert reports.failed == [] and len(reports.passed) > 60


@pytest.mark.long
def test_a_method_that_accepts_a_wrong_token_is_caught_with_servers():
    reports = _run(
        "TOY_BIASED", SAMPLING, "-k", "synchronous"
    )  # the other server drafts only where that pays
    assert set(reports.failed) == {"test_same_distribution_as_plain"} and not reports.passed
