"""The serving benchmark without servers: who is asked what, what is expected, how results are made."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.prompts import SPEC_BENCH
from benchmarks.replay.methods import Corpus
from benchmarks.report.__main__ import main as report
from benchmarks.report.records import JOURNAL, Journal
from benchmarks.serve.__main__ import left_out
from benchmarks.serve.cases import CASES, Case, Pool, Request, deal, pilots, prompts_for
from benchmarks.serve.measure import Counters, breakdown, points
from benchmarks.serve.prediction import (
    RECENT,
    Forecasts,
    Recent,
    Simulation,
    StepTime,
    merged,
    traces_of,
)
from benchmarks.serve.summary import difference_rate, summarise
from benchmarks.serve.tables import SAMPLED
from benchmarks.serve.variants import VARIANTS, WITH_DRAFT, WITH_HEAD, Knowledge, Settings, server_spec
from sglang_patches.step.length import StepTimes

VOCABULARY = 1000
RNG = np.random.default_rng(0)


class Tokenizer:
    """One token a character."""

    def apply_chat_template(self, messages, **options):
        return [ord(letter) for message in messages for letter in message["content"]]

    def __len__(self):
        return VOCABULARY


def rows(**counts: int) -> list[dict]:
    texts = {"answer": "yes"}
    return [
        texts | {"category": name, "prompt": f"{name} {i}", "prompt_tokens": [i] * 9, "tokens": [i] * 20}
        for name, count in counts.items()
        for i in range(count)
    ]


def pool(**counts: int) -> Pool:
    return Pool(rows(**counts), Tokenizer())


def identities(groups) -> list[tuple]:
    return [(request.category, tuple(request.prompt)) for group in groups for request in group]


def test_no_prompt_is_asked_twice():
    shared = pool(qa=60, rag=60)
    cases = [CASES[name](shared, [1, 4], 7) for name in ("mixed", "tasks", "repeated", "sampled", "streamed")]
    asked = [one for case in cases for groups in case.groups.values() for one in identities(groups)]
    assert len(asked) == len(set(asked)) > 40


def test_groups_of_tasks_hold_one_category_each_and_are_full():
    shared = pool(qa=20, rag=9, writing=9)
    case = CASES["tasks"](shared, [1, 4], 6)  # batch 4 has seven prompts a group
    for batch, groups in case.groups.items():
        assert all(len(group) == prompts_for(batch) for group in groups)
        assert all(len({request.category for request in group}) == 1 for group in groups)
    assert {group[0].category for group in case.groups[1]} == {"qa", "rag", "mt_bench"}
    assert [group[0].category for group in case.groups[4]] == ["qa", "qa"]  # the others have too few left
    assert left_out([case], shared.categories()) == {4: ["mt_bench", "rag"]}


def test_a_batch_size_has_three_groups_at_least_where_prompts_suffice():
    dealt = deal(pool(qa=60).take, [1, 8, 4], 4)
    assert {batch: len(groups) for batch, groups in dealt.items()} == {1: 4, 8: 3, 4: 1}


def test_order_is_the_same_every_time():
    first, second = (identities(CASES["mixed"](pool(qa=20), [1], 5).groups[1]) for _ in range(2))
    assert first == second


def test_followups_hold_the_recorded_answer():
    (group, *_) = CASES["followup"](pool(qa=3), [1], 1).groups[1]
    text = "".join(map(chr, group[0].prompt))
    assert "qa" in text and "yes" in text and text.endswith((".", "?"))


def test_long_prompts_are_long():
    case = CASES["long"](pool(qa=400), [1], 1)
    assert len(case.groups[1][0][0].prompt) > 1000


def test_unrelated_prompts_share_nothing():
    prompts = [
        request.prompt for group in CASES["unrelated"](pool(qa=1), [1], 6).groups[1] for request in group
    ]
    assert len(prompts) == 6
    assert all(len(set(a) & set(b)) < 20 for a, b in pairwise(prompts))


def test_the_second_pilot_has_long_prompts_and_takes_none_of_the_pool():
    shared = pool(qa=40)
    ordinary, long_prompts = pilots(shared, [1, 4])
    assert {batch: len(groups) for batch, groups in ordinary.groups.items()} == {1: 6, 4: 2}
    assert {len(r.prompt) for groups in long_prompts.groups.values() for g in groups for r in g} == {600}
    assert [[len(group) for group in groups] for groups in long_prompts.groups.values()] == [[1, 1], [4, 4]]
    assert len(shared.take(100)) == 40 - 6 - 2 * 7


def test_the_document_knows_which_cases_are_sampled():
    temperatures = {name: case(pool(qa=400), [1], 1).sampling["temperature"] for name, case in CASES.items()}
    assert set(SAMPLED) == {name for name, temperature in temperatures.items() if temperature > 0}


def test_points_keep_the_order_of_cases_and_batches():
    case = CASES["mixed"](pool(qa=40), [1, 4], 3)
    places = [(point.batch, point.index) for point in points([case])]
    assert places == [(1, 0), (1, 1), (1, 2), (4, 0), (4, 1), (4, 2)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_arm_has_a_server(variant, tmp_path):
    knowledge = Knowledge(tmp_path / "prior", tmp_path / "crowded", tmp_path / "corpus.jsonl")
    settings = Settings(tmp_path, tmp_path / "draft", tmp_path / "head", "bfloat16", 15, (1, 8))
    words = server_spec(variant, settings, knowledge, {"control": 7, "datastore": 8, "metrics": 9}).command(1)
    assert ("--speculative-algorithm" in words) == (variant != "plain")
    assert ("--speculative-draft-model-path" in words) == (variant in (*WITH_DRAFT, *WITH_HEAD))
    assert words[words.index("--max-running-requests") + 1] == "8"


def pilot(cells, context=100.0) -> dict:
    return {
        "cells": cells, "decoded": 60, "steps": 30, "seconds": 1.2, "tokens": 60, "wall_seconds": 4.0,
        "outputs": [[1]] * 4, "context": context,
    }  # fmt: skip


def times_of(load: dict, longer: dict, batch: int) -> StepTime:
    return Recent([load], longer, batch, 16).step_time()


def test_step_time_of_a_server_without_counters_is_its_mean_step():
    slower = pilot([], 300.0) | {"seconds": 1.8}
    time = times_of(pilot([]), slower, 1)
    assert [time(16, 100), time(16, 200)] == pytest.approx([1.2 / 30, 1.5 / 30])


@pytest.mark.parametrize(
    ("cells", "longer", "seconds"),
    [  # between and beyond measured rows
        ([[4, 1, 10, 0.1], [4, 8, 10, 0.8], [2, 1, 5, 0.5]], [[4, 8, 10, 0.9]],
         {(1, 100): 0.01, (8, 100): 0.08, (4, 100): 0.04, (16, 100): 0.16, (8, 200): 0.09}),
        # widths that only the longer prompts saw
        ([[4, 1, 10, 0.1]], [[4, 1, 10, 0.2], [4, 8, 10, 0.9]], {(1, 100): 0.01, (8, 100): 0.08, (8, 200): 0.09}),
        # more rows are never thought quicker
        ([[4, 1, 10, 0.1], [4, 6, 3, 0.16], [4, 8, 1, 0.04]], [], {(6, 100): 0.05, (8, 100): 0.05, (16, 100): 0.0957}),
        # a step never gets shorter with its context
        ([[4, 1, 10, 0.1]], [[4, 1, 10, 0.1]], {(1, 1000): 0.01}),
    ],
)  # fmt: skip
def test_step_time_by_rows_and_context(cells, longer, seconds):
    time = times_of(pilot(cells), pilot(longer, 200.0), 4)
    assert {at: time(*at) for at in seconds} == pytest.approx(seconds, rel=1e-3)
    assert time.admission == pytest.approx((4.0 - sum(total for *_, total in cells)) / 4)


def test_step_times_of_several_loads_are_those_of_all_their_steps():
    first, second = pilot([[4, 1, 10, 0.1], [4, 8, 5, 0.4]]), pilot([[4, 1, 30, 0.6]], 200.0)
    assert times_of(merged([first, second]), pilot([], 300.0), 4).seconds == pytest.approx((0.0175, 0.08))
    both = merged([pilot([]), pilot([], 200.0) | {"seconds": 1.8}])
    assert times_of(both, both, 1)(16, 150) == pytest.approx(3.0 / 60)
    assert len(both["outputs"]) == 8


def group_of(*texts: np.ndarray) -> list[Request]:
    return [Request("any", text[:10].tolist(), text[10:]) for text in texts]


PHRASE = RNG.integers(1, VOCABULARY, 12).astype(np.int32)
PERIODIC = [np.roll(np.tile(PHRASE, 12), shift) for shift in range(3)]
CORPUS = Corpus([], vocab_size=VOCABULARY)


def predict(
    variant: str, groups: list[list[Request]], batch: int, nodes: int, time: StepTime, corpus: Corpus
) -> float:
    """Tokens a second of loads one after the other, each on a server whose steps take this time."""
    cells = [[batch, rows, 1, seconds] for rows, seconds in zip(time.rows, time.seconds, strict=True)]
    load = pilot(cells) | {"wall_seconds": 0.0}
    forecasts = Forecasts({(variant, batch): Recent([load], load, batch, nodes + 1)}, nodes, corpus, 64)
    expected = [forecasts.of(variant, Case("mixed", {}), batch, group) for group in groups]
    tokens, seconds = zip(*expected, strict=True)
    return sum(tokens) / sum(seconds)


UNRELATED = [RNG.integers(1, VOCABULARY, 100).astype(np.int32) for _ in range(3)]


@pytest.mark.parametrize(
    ("variant", "texts", "seconds", "least", "most"),
    [
        ("plain", PERIODIC, [0.05], 1, 1),  # one token a request and step
        ("sssd", PERIODIC, [0.05, 0.05], 4, 16),  # text recurs, and rows are free
        ("sssd", PERIODIC, [0.05, 4.0], 0.9, 1.1),  # rows cost too much
        ("sssd", UNRELATED, [0.05, 0.06], 0.9, 1.1),
        ("ngram", PERIODIC, [0.05], 2, 16),  # by its replay
    ],
)
def test_predictions(variant, texts, seconds, least, most):
    """Tokens a second over plain decoding's."""
    rows = [1, 16] if len(seconds) > 1 else [16 if variant == "ngram" else 1]
    found = predict(variant, [group_of(*texts)], 2, 15, StepTime(rows, seconds), CORPUS) / (2 / 0.05)
    assert least * (1 - 1e-9) <= found <= most * (1 + 1e-9) and (least == most or found != least)


def test_the_speculation_length_finds_known_step_times_under_a_wandering_pace():
    true = StepTime([1, 16], [0.05, 0.06])

    # The linear layers alone take a part of a step, and of what more rows add.
    def layers(rows: float) -> float:
        return 0.36 * 0.05 + 0.45 * (true(max(1.0, rows / 2), 0.0) - 0.05)

    known = Simulation(CORPUS, 2, 15, true, layers, lambda: 1.0)
    known.policy.times = KnownTimes(true)
    learning = Simulation(CORPUS, 2, 15, true, layers, partial(next, paces()))
    best, learned = ([speed(simulation) for _ in range(2)] for simulation in (known, learning))
    assert best[1] > best[0] > 2 / 0.05 * 2
    assert sum(learned) > 0.8 * sum(best)


class KnownTimes(StepTimes):
    """What the policy would choose by if it knew how long steps take."""

    def __init__(self, true: StepTime) -> None:
        super().__init__(lambda rows: 1.0)
        self._true = true

    def seconds(self, batch: int, rows: Sequence[int]) -> list[float]:
        return [self._true(count / batch, 0.0) for count in rows]


def paces() -> Iterator[float]:
    """How much slower than true each step looks on a machine that others use too."""
    rng = np.random.default_rng(1)
    while True:
        slowness = rng.choice((0.0, 0.0, 0.2, 0.4, 0.7))
        for _ in range(rng.integers(10, 150)):
            yield float(np.exp(slowness + rng.normal(0.0, 0.1)))


def speed(simulation: Simulation) -> float:
    """Tokens a second of texts that recur."""
    produced, seconds = simulation.load(traces_of(group_of(*PERIODIC), 120))
    return produced / seconds


@pytest.mark.parametrize("variant", ["sssd_cold", "sssd_static"])
def test_arms_without_a_prior_are_predicted_without_it(variant):
    time, groups = StepTime([1, 16], [0.05, 0.05]), [group_of(*PERIODIC)]
    told = Corpus([group[10:] for group in PERIODIC], vocab_size=VOCABULARY)
    assert predict(variant, groups, 2, 15, time, told) == predict(variant, groups, 2, 15, time, CORPUS)
    gain = predict("sssd", groups, 2, 15, time, told) / predict("sssd", groups, 2, 15, time, CORPUS)
    assert gain > 1.05


def test_answers_that_are_not_recorded_are_not_predicted():
    forecasts = Forecasts({("plain", 1): Recent([pilot([])], pilot([], 300.0), 1, 1)}, 15, CORPUS, 64)
    recorded, mixed = group_of(PERIODIC[0]), Case("mixed", {})
    assert forecasts.of("plain", mixed, 1, recorded) is not None
    assert forecasts.of("plain", mixed, 1, [Request("any", [1, 2, 3])]) is None
    for other in (
        replace(mixed, seen=True),
        replace(mixed, sampling={"temperature": 0.7}),
        replace(mixed, chunk=1),
    ):
        assert forecasts.of("plain", other, 1, recorded) is None


def test_a_forecast_follows_the_pace_of_the_loads_before_it():
    loads = [pilot([]), pilot([])]
    forecasts = Forecasts({("plain", 1): Recent(loads, pilot([], 300.0), 1, 1)}, 15, CORPUS, 64)
    mixed, group = Case("mixed", {}), group_of(PERIODIC[0])

    def seconds() -> float:
        return forecasts.of("plain", mixed, 1, group)[1]

    first, slow = seconds(), pilot([]) | {"seconds": 2.4}
    forecasts.learn("plain", replace(mixed, seen=True), 1, slow)
    assert seconds() == first  # another kind of load
    for _ in range(RECENT):
        forecasts.learn("plain", mixed, 1, slow)
    assert seconds() == pytest.approx(2 * first)


def test_outputs_that_differ_anywhere():
    outputs = [[1, 2], [1, 2, 3], [1, 2], [1]]
    same = [[1, 2], [1, 9, 3], [1, 2, 3], [1]]
    assert difference_rate([{"outputs": outputs}], [{"outputs": same}]) == 0.5


def record(variant: str, group: int, category: str, seconds: float) -> dict:
    of_ours = {"draft": 0.2, "prepare": 0.1, "forward": 0.5, "verify": 0.1, "commit": 0.0, "retrieve": 0.1}
    phases = {} if variant == "plain" else of_ours
    return {
        "case": "tasks", "batch": 1, "group": group, "category": category, "variant": variant, "tokens": 10, "decoded": 9,
        "steps": 3, "seconds": seconds, "outputs": [[1]], "ttft_seconds": [0.1], "gaps": [0.1, 0.2],
        "wall_seconds": 1.0, "cells": [[1, 2, 3, 1.0]] if phases else [], "phases": phases, "served": 0.0,
        "expected": (9.0, 1.25) if phases else None,
    }  # fmt: skip


RECORDS = [record(a, g, c, s) for g, c in ((0, "x"), (0, "y")) for a, s in (("plain", 2.0), ("sssd", 1.0))]


def test_summary_has_every_category_and_the_total():
    summary = {(row["category"], row["variant"]): row for row in summarise(RECORDS)}
    assert summary["x", "sssd"]["throughput_ratio"].value == 2.0
    assert summary["all", "sssd"]["tokens_per_step"].value == 3.0
    assert summary["all", "sssd"]["predicted_tokens_per_second"] == 18.0 / 2.5
    assert summary["all", "plain"]["predicted_tokens_per_second"] is None
    assert "predicted_tokens_per_second" not in summary["x", "sssd"]
    assert set(summary) == {(c, a) for c in ("x", "y", "all") for a in ("plain", "sssd")}


def test_spec_bench_has_a_row_of_its_own_beside_other_tasks():
    records = [record(variant, 0, c, 1.0) for c in (*SPEC_BENCH, "gsm8k") for variant in ("plain", "sssd")]
    groups = {row["category"]: row["groups"] for row in summarise(records)}
    assert groups["Spec-Bench"] == 6 and groups["all"] == 7
    alone = {row["category"] for row in summarise([r for r in records if r["category"] != "gsm8k"])}
    assert alone == {*SPEC_BENCH, "all"}


def test_breakdown_sums_to_one_and_keeps_waiting_apart():
    shares = breakdown([record("sssd", 0, "x", 1.0)])
    assert sum(shares.values()) == pytest.approx(1)
    assert (shares["retrieval"], shares["forward"]) == (0.1, 0.5)
    assert shares["bookkeeping"] == pytest.approx(0.2)
    assert shares["transport"] == 0
    of_a_service = breakdown([record("sssd", 0, "x", 1.0) | {"served": 0.04}])
    assert (of_a_service["retrieval"], of_a_service["transport"]) == pytest.approx((0.04, 0.06))
    assert breakdown([record("plain", 0, "x", 1.0)]) == {}


def test_counters_are_differences():
    before = Counters({"forward": 1.0}, {(1, 1): (10, 1.0)}, 2.0)
    after = Counters({"forward": 1.5, "draft": 0.1}, {(1, 1): (10, 1.0), (1, 4): (3, 0.6)}, 2.5)
    spent = after.since(before)
    assert spent.phases == {"forward": 0.5, "draft": 0.1}
    assert spent.cells == {(1, 4): (3, 0.6)} and spent.served == 0.5


def test_a_broken_run_has_a_page_of_what_it_measured(tmp_path):
    """The last group has not been on every server."""
    made = {
        "command": "serve", "packages": {}, "commit": "c", "lock": "l", "python": "3", "processor": "p", "cores": 1,
        "prompts": {}, "settings": {"variants": ["plain", "sssd"]},
    }  # fmt: skip
    journal = Journal(tmp_path / f"broken{JOURNAL}", made)
    journal.add("pilot", record("plain", 0, "x", 9.0))
    for row in [
        *(one | {"case": "mixed", "expected": (9.0, 1.25)} for one in RECORDS),
        record("plain", 7, "x", 1.0),
    ]:
        journal.add("group", row)
    journal.add("bench_serving", {
        "batch": 1, "variant": "plain", "output_throughput": 10.0, "median_ttft_ms": 1, "median_itl_ms": 2, "p99_itl_ms": 3,
    })  # fmt: skip
    report([str(tmp_path)])
    summary = json.loads((tmp_path / "broken.json").read_text())["summary"]
    assert len(summary) == 6 and summary[0]["by_group"]["seconds"] == [2.0]
    text = (tmp_path / "README.md").read_text()
    assert "| mixed at batch 1 | 2 | 5 | 2.00 [2.00, 2.00] (3.00) |" in text
    assert "sglang.bench_serving" in text and "python -m benchmarks.serve --variants plain sssd" in text
    assert {path.name for path in tmp_path.glob("*.png")} == {"broken-cases.png", "broken-steps.png"}
