"""Sampled output has plain decoding's distribution, counted on a model with 24 words.

Two-sample G-tests of continuations of two, three and four tokens, plain against SSSD. The last test puts a fault into
the verification and shows that the same count notices it.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from scipy.stats import chi2_contingency

from benchmarks.servers import ServerSpec, SglangServer, running

SAMPLES = 2000
CONTINUATION = 4
SIGNIFICANCE = 1e-4  # a dozen tests a run: a false alarm once in some hundred runs
PROMPT_LENGTH = 200
BIASED_PLUGIN = Path(__file__).parent / "biased_plugin"

SETTINGS = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7 top-p": {"temperature": 0.7, "top_p": 0.8},
    "temperature 1 top-k min-p": {"temperature": 1.0, "top_k": 6, "min_p": 0.05},
    "repetition penalty": {"temperature": 1.0, "repetition_penalty": 1.5},
    "frequency and presence penalty": {"temperature": 1.0, "frequency_penalty": 0.6, "presence_penalty": 0.4},
}


def _tiny_spec(model: Path, name: str, algorithm: str | None, **changes) -> ServerSpec:
    flags = ("--specstore-nodes", "7", "--specstore-length", "static", "--specstore-deadline-ms", "1000")
    return ServerSpec(
        name,
        model,
        algorithm,
        dtype="float32",
        nodes=7,
        flags=flags[2:] if algorithm else (),
        max_running_requests=48,
        **changes,
    )


@pytest.fixture(scope="module")
def plain(tiny_model, logs):
    # Without overlap: with it, stock plain decoding applies penalties a token late.
    with running(_tiny_spec(tiny_model, "tiny-plain", None, overlap=False), logs) as server:
        yield server


@pytest.fixture(scope="module")
def prompt(plain) -> list[int]:
    """The model's own text: its n-grams are likely to come again, so that drafts are accepted."""
    sampling = {"temperature": 1.0, "sampling_seed": 3, "max_new_tokens": PROMPT_LENGTH, "ignore_eos": True}
    return plain.generate([5], **sampling)["output_ids"]


@pytest.fixture(scope="module", params=["overlap", "synchronous"])
def drafting(request, tiny_model, logs):
    spec = _tiny_spec(tiny_model, f"tiny-sssd-{request.param}", "SSSD", overlap=request.param == "overlap")
    with running(spec, logs) as server:
        yield server


def _draw(server: SglangServer, prompt: list[int], sampling: dict) -> tuple[Counter, float]:
    """Counts of continuations, and tokens per verification step."""
    answers = server.generate_many(
        [prompt] * (SAMPLES // 20), 4, max_new_tokens=CONTINUATION, ignore_eos=True, n=20, **sampling
    )
    flat = [answer for group in answers for answer in group]
    steps = sum(answer["meta_info"].get("spec_verify_ct", CONTINUATION - 1) for answer in flat)
    return Counter(tuple(answer["output_ids"]) for answer in flat), len(flat) * (CONTINUATION - 1) / steps


def _p_value(left: Counter, right: Counter) -> float:
    """The smallest of the G-tests of the first two, three and four tokens, times three for the choice: the shorter
    ones see a small bias, the longer ones one that needs the context."""
    lengths = range(2, CONTINUATION + 1)
    return min(1.0, min(_g_test(_cut(left, n), _cut(right, n)) for n in lengths) * len(lengths))


def _cut(counts: Counter, length: int) -> Counter:
    shorter: Counter = Counter()
    for outcome, count in counts.items():
        shorter[outcome[:length]] += count
    return shorter


def _g_test(left: Counter, right: Counter) -> float:
    """p-value of two samples; outcomes seen fewer than ten times in all count as one."""
    cells: Counter = Counter()
    rows: list[Counter] = [Counter(), Counter()]
    for outcome in left.keys() | right.keys():
        cell = outcome if left[outcome] + right[outcome] >= 10 else "rare"
        cells[cell] += left[outcome] + right[outcome]
        rows[0][cell] += left[outcome]
        rows[1][cell] += right[outcome]
    table = [[row[cell] for cell in cells] for row in rows]
    return chi2_contingency(table, lambda_="log-likelihood").pvalue


@pytest.mark.parametrize("name", SETTINGS)
def test_same_distribution_as_plain(plain, drafting, prompt, name):
    expected, _ = _draw(plain, prompt, SETTINGS[name])
    found, tokens_per_step = _draw(drafting, prompt, SETTINGS[name])
    assert tokens_per_step > 1.05, "nothing was accepted, the test would show nothing"
    assert len(expected) > 20, "one continuation takes all, the test would show nothing"
    assert _p_value(expected, found) > SIGNIFICANCE


def test_the_count_notices_a_biased_verification(plain, prompt, tiny_model, logs):
    path = os.pathsep.join([str(BIASED_PLUGIN), os.environ.get("PYTHONPATH", "")])
    spec = _tiny_spec(tiny_model, "tiny-biased", "SSSD", environment={"PYTHONPATH": path})
    expected, _ = _draw(plain, prompt, SETTINGS["temperature 1"])
    with running(spec, logs) as server:
        found, _ = _draw(server, prompt, SETTINGS["temperature 1"])
    assert _p_value(expected, found) < SIGNIFICANCE
