"""`python -m sglang_patches.check`: what it calls wrong, and the kernels of a CPU. tests/e2e/test_check.py runs it whole."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("sglang")

from sglang_patches.check.answers import _summary  # noqa: E402
from sglang_patches.check.greedy import Comparison  # noqa: E402


def _comparison(plain, ours, margins, dtype="float32"):
    comparison = Comparison("model", "cpu", 3)
    comparison._plain = {"tokens": plain, "margins": margins, "dtype": dtype}
    comparison._speculative = {"tokens": ours}
    return comparison.compare()


def test_equal_answers_pass():
    assert _comparison([[1, 2, 3]], [[1, 2, 3]], [[1.0, 1.0, 1.0]]) is None


@pytest.mark.parametrize("ours", [[1, 9, 3], [1, 2]])
def test_another_token_or_an_early_end_is_named(ours):
    wrong = _comparison([[1, 2, 3]], [ours], [[1.0, 0.7, 1.0]])
    assert "1 of 1 answers differ" in wrong


def test_where_plain_decoding_was_undecided_a_difference_is_counted_as_rounding():
    counted = _comparison([[1, 2]], [[1, 3]], [[1.0, 0.1]], dtype="bfloat16")
    assert counted == "ok, 1 answers part by rounding"
    assert "more than rounding" in _comparison([[1, 2]], [[1, 3]], [[1.0, 0.1]], dtype="float32")


def test_another_method_is_checked_and_plain_decoding_has_the_other_flags_alone(monkeypatch):
    drafting = (
        "--speculative-algorithm SAGUARO --speculative-draft-model-path draft --specstore-draft-device cuda:0"
    )
    flags = f"--dtype bfloat16 {drafting} --disable-overlap-schedule".split()
    comparison, asked = Comparison("model", "cuda", 3, flags), []

    def answers(words):
        asked.append(words)
        return {"tokens_per_step": 2.0}

    monkeypatch.setattr(comparison, "_answers", answers)
    comparison.answer_plainly()
    comparison.answer_speculatively()
    plain, speculative = asked
    assert plain == ["--dtype", "bfloat16", "--disable-overlap-schedule"]
    assert speculative == ["--speculative-algorithm", "SSSD", *flags]  # the last algorithm counts


def test_engine_that_failed_is_not_taken_for_equality():
    assert "not compared" in Comparison("model", "cpu", 3).compare()


def test_an_engine_that_accepts_no_draft_is_named(monkeypatch):
    """The first of four tokens is the prefill's."""
    info = {"completion_tokens": 4, "spec_verify_ct": 3, "output_top_logprobs": []}
    said = _summary([{"meta_info": info, "output_ids": [5, 6, 7, 8]}], "float32")
    monkeypatch.setattr(Comparison, "_answers", lambda comparison, algorithm: said)
    assert "no drafted token was accepted (1.00" in Comparison("model", "cpu", 4).answer_speculatively()


@pytest.fixture(scope="module")
def found() -> dict[str, list[str | None]]:
    """What each kernel check finds: as things are, and with a fault in the kernel."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.plugin.faulty_kernels"],
        env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_of_a_cpu_pass(found):
    assert len(found) == 4
    assert all(wrong is None for wrong, _ in found.values()), found


def test_kernel_with_a_fault_is_noticed(found):
    assert all(wrong is not None for _, wrong in found.values()), found


def test_a_model_that_is_no_folder_is_refused_before_anything_runs():
    command = [sys.executable, "-m", "sglang_patches.check", "--device", "cpu", "--model", "/nope"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--model: /nope: no such folder" in done.stderr and done.stdout == ""
