"""Sampled output has plain decoding's distribution, counted on a model with 24 words.

Two-sample G-tests of continuations of two, three and four tokens, plain against SSSD. The last test puts a fault into
the verification and shows that the same count notices it.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from scipy.stats import chi2_contingency

from sglang_patches.launch.servers import ServerSpec
from tests.support.servers import SglangServer, running

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


def _drafting_spec(model: Path, name: str, **changes) -> ServerSpec:
    flags = ("--specstore-length", "static", "--specstore-deadline-ms", "1000")
    sizes = {"nodes": 7, "max_running_requests": 48}
    return ServerSpec(name, model, "SSSD", dtype="float32", flags=flags, **sizes, **changes)


@pytest.fixture(scope="module")
def prompt(tiny_plain) -> list[int]:
    """The model's own text: its n-grams are likely to come again, so that drafts are accepted."""
    sampling = {"temperature": 1.0, "sampling_seed": 3, "max_new_tokens": PROMPT_LENGTH, "ignore_eos": True}
    return tiny_plain.generate([5], **sampling)["output_ids"]


@pytest.fixture(scope="module")
def expected(tiny_plain, prompt) -> Callable[[str], Counter]:
    """Plain decoding's counts at a setting, drawn once."""
    return functools.cache(lambda setting: _draw(tiny_plain, prompt, SETTINGS[setting])[0])


@pytest.fixture(scope="module", params=["overlap", "synchronous"])
def drafting(request, tiny_model, logs):
    spec = _drafting_spec(tiny_model, f"tiny-sssd-{request.param}", overlap=request.param == "overlap")
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
def test_same_distribution_as_plain(expected, drafting, prompt, name):
    found, tokens_per_step = _draw(drafting, prompt, SETTINGS[name])
    assert tokens_per_step > 1.05, "nothing was accepted, the test would show nothing"
    assert len(expected(name)) > 20, "one continuation takes all, the test would show nothing"
    assert _p_value(expected(name), found) > SIGNIFICANCE


def test_the_count_notices_a_biased_verification(expected, prompt, tiny_model, logs):
    path = os.pathsep.join([str(BIASED_PLUGIN), os.environ.get("PYTHONPATH", "")])
    spec = _drafting_spec(tiny_model, "tiny-biased", environment={"PYTHONPATH": path})
    with running(spec, logs) as server:
        found, _ = _draw(server, prompt, SETTINGS["temperature 1"])
    assert _p_value(expected("temperature 1"), found) < SIGNIFICANCE
