"""Sampled output of servers has plain decoding's distribution: two-sample G-tests of continuations of two to four tokens.

All settings are drawn together, several answers a request, so that batches mix them. `test_in_process` counts more
draws against exact probabilities.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from scipy.stats import chi2_contingency

from tests.conformance.conftest import is_adaptive
from tests.support.servers.forked import SglangServer

ROUNDS, ANSWERS = 16, 20
CONTINUATION = 4
PROMPT = 4  # of the models' texts, one whose continuations are many
# A run with all drafts has some two hundred p-values, of which one is below the first limit in fifty runs. What is below it is drawn
# again. That draw has the second limit, so that a bias is missed no more often.
SIGNIFICANCE, AGAIN = 1e-4, 1e-2

SETTINGS = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7 top-p": {"temperature": 0.7, "top_p": 0.8},
    "temperature 1 top-k min-p": {"temperature": 1.0, "top_k": 6, "min_p": 0.05},
    "repetition penalty": {"temperature": 1.0, "repetition_penalty": 1.5},
    "frequency and presence penalty": {"temperature": 1.0, "frequency_penalty": 0.6, "presence_penalty": 0.4},
}


@pytest.fixture(scope="session")
def expected(plain, prompts) -> dict[str, Counter]:
    """Plain decoding's counts."""
    return _draw(plain, prompts[PROMPT])[0]


def _draw(server: SglangServer, prompt: list[int]) -> tuple[dict[str, Counter], float]:
    """Counts of continuations by setting, and tokens per verification step."""
    asked = [setting for _ in range(ROUNDS) for setting in SETTINGS]
    sizes = {"max_new_tokens": CONTINUATION, "ignore_eos": True, "n": ANSWERS}
    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(lambda setting: server.generate(prompt, **sizes, **SETTINGS[setting]), asked))
    counts = {setting: Counter() for setting in SETTINGS}
    for setting, group in zip(asked, groups, strict=True):
        counts[setting].update(tuple(answer["output_ids"]) for answer in group)
    steps = sum(a["meta_info"].get("spec_verify_ct", CONTINUATION - 1) for group in groups for a in group)
    return counts, len(groups) * ANSWERS * (CONTINUATION - 1) / steps


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


def _p_values(left: dict[str, Counter], right: dict[str, Counter]) -> dict[str, float]:
    return {setting: _p_value(left[setting], right[setting]) for setting in SETTINGS}


def test_same_distribution_as_plain(server, plain, expected, prompts):
    found, tokens_per_step = _draw(server, prompts[PROMPT])
    assert tokens_per_step > 1.05 or is_adaptive(server), "nothing was accepted, the test would show nothing"
    assert all(len(counts) > 10 for counts in expected.values()), "one continuation takes all"
    p_values = _p_values(expected, found)
    if suspect := [setting for setting, p_value in p_values.items() if p_value <= SIGNIFICANCE]:
        again = _p_values(*(_draw(one, prompts[PROMPT])[0] for one in (plain, server)))
        assert min(again[setting] for setting in suspect) > AGAIN, (p_values, again)
