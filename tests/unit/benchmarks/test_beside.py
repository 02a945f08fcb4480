"""The table of drafting beside the target without servers: what is timed, what is forecast, what comes out."""

import argparse
import dataclasses
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.beside import tables
from benchmarks.beside import window as timing
from benchmarks.beside.__main__ import length_of, parse
from benchmarks.beside.costs import DraftTimes, TargetTimes, since
from benchmarks.beside.forecast import Forecaster, with_first_token
from benchmarks.beside.models import by_length
from benchmarks.beside.run import forecast_options
from benchmarks.beside.servers import BESIDE, VARIANTS, WITH_DRAFT, Setup, check_room, server_spec
from benchmarks.beside.summary import cells_of, summarise
from benchmarks.beside.tables import FORECASTS
from benchmarks.beside.window import Course, decode, window
from benchmarks.pipeline.methods import policy_of
from benchmarks.pipeline.models import pairs_of
from benchmarks.pipeline.pairs import Pair, synthetic
from benchmarks.replay.methods import Corpus
from benchmarks.report import plots
from benchmarks.report.records import Journal, dumps, journalled
from benchmarks.traces import SHIPPED, Trace
from sglang_patches.options import Options, add_flags
from tests.support.servers.engine import StreamFailedError

K, ROWS, STEP = 4, 24, 1.0


def course(*counts: int, begin: float = 0.0) -> Course:
    return Course([begin + at for at in range(len(counts))], list(counts), [])


def test_the_timed_part_ends_with_the_fastest_answer():
    fast, slow = course(1, 5, 9, 13, 17, 18), course(1, 2, 3, 4, 5, 6)
    timed = window([fast, slow], warm=5, until=17)
    assert timed == {"seconds": 3, "tokens": 12 + 3, "steps": 6}


def test_the_timed_part_begins_when_all_have_begun():
    early, late = course(1, 5, 9, 13, 17), course(1, 2, 3, begin=2.0)
    assert window([early, late], warm=5, until=17) == {"seconds": 2, "tokens": 8 + 2, "steps": 4}
    with pytest.raises(ValueError, match="17 tokens before all have begun"):
        window([early, course(1, begin=9.0)], warm=5, until=17)


class Server:
    """Emits so many tokens a step for a prompt as its only token says, until it is told to stop; then it fails, as SGLang does.
    All answers take their steps together. answers: how many."""

    def __init__(self, answers: int) -> None:
        self._together = threading.Barrier(answers)

    def stop(self) -> None:
        self._together.abort()

    def stream(self, prompt, **_):
        for step in range(1000):
            try:
                self._together.wait(60)
            except threading.BrokenBarrierError:
                raise StreamFailedError("aborted") from None
            yield {"output_ids": [1] * (1 + step * prompt[0])}
        raise AssertionError("never told to stop")


def test_all_answers_are_cut_when_one_is_done(monkeypatch):
    monkeypatch.setattr(timing, "_abort_all", Server.stop)
    quick, slow = decode(Server(2), [[3], [1]], 31)
    assert quick.counts[-1] == 31 and slow.counts[-1] in (10, 11)  # it may not have got its last step
    assert len(quick.times) == len(quick.counts) and quick.tokens == [1] * quick.counts[-1]
    timed = window([quick, slow], 10, 31)
    assert timed["tokens"] == pytest.approx(28, abs=3)


def test_an_answer_that_fails_before_is_an_error():
    server = Server(1)
    server.stop()
    with pytest.raises(StreamFailedError):
        decode(server, [[3]], 31)


def counters(forwards, seconds, rows) -> dict:
    return {
        "forwards": forwards,
        "seconds": seconds,
        "rows": rows,
        "prefill": {"seconds": 2.0, "tokens": 400.0},
        "rounds": {"seconds": 2.0 + sum(seconds.values()) * 1.5, "count": sum(forwards.values())},
    }


def test_draft_times_are_those_of_all_loads():
    times = DraftTimes()
    times.learn(counters({"8": 2}, {"8": 0.2}, {"8": 12}))
    times.learn(counters({"8": 2, "32": 5}, {"8": 0.2, "32": 1.0}, {"8": 12, "32": 120}))
    assert times.points() == [(6, 0.1), (24, 0.2)]
    assert times.forward(15) == pytest.approx(0.15) and times.prefill(100) == pytest.approx(0.5)
    assert times.around_forward == pytest.approx(0.5 * 1.4 / 9)


def test_more_rows_of_a_draft_forward_are_never_thought_quicker():
    times = DraftTimes()
    times.learn(counters({"1": 1, "8": 1}, {"1": 0.3, "8": 0.1}, {"1": 1, "8": 8}))
    assert times.forward(1) == times.forward(8) == pytest.approx(0.2)


def test_what_a_load_adds():
    before, after = {"lookups": {"hit": 2.0}}, {"lookups": {"hit": 5.0, "miss": 1.0}, "rows": {"8": 3.0}}
    assert since(before, after) == {"lookups": {"hit": 3.0, "miss": 1.0}, "rows": {"8": 3.0}}


def test_step_times_are_of_one_batch_size():
    times = TargetTimes()
    times.learn([[4, 1, 10, 1.0], [4, 5, 5, 1.0], [1, 5, 5, 0.1]])
    times.learn([[4, 5, 5, 2.0]])
    assert [times.of(4)(rows, 0.0) for rows in (1, 5)] == pytest.approx([0.1, 0.3])
    with pytest.raises(ValueError, match="no step of batch 8"):
        times.of(8)


def synthetic_pairs(count: int, acceptance: float) -> list[Pair]:
    made = [synthetic(np.random.default_rng([3, at]), 400, acceptance, 0.6, 0.5) for at in range(count)]
    return [
        with_first_token(Pair(np.arange(9, dtype=np.int32), p.tokens, p.choices, p.probabilities))
        for p in made
    ]


def draft_times(seconds: float, prefill: float = 0.0) -> DraftTimes:
    times = DraftTimes()
    times.learn(
        counters({"32": 1}, {"32": seconds}, {"32": ROWS})
        | {"prefill": {"seconds": prefill, "tokens": 1.0}, "rounds": {}}
    )
    return times


def forecaster(pair: Pair, method: str = "SAGUARO", known: Sequence[Pair] = ()) -> Forecaster:
    """known: to the datastores."""
    options = Options(nodes=K, draft_rows=ROWS, draft_lookahead=K, publish="off")
    corpus = Corpus([of.tokens for of in known], vocab_size=50_000)
    policy = policy_of("static", K, lambda rows: STEP)
    return Forecaster(method, options, corpus, policy, pair, 0.0)


def forecast(
    acceptance: float, draft: DraftTimes, method: str = "SAGUARO", known: bool = False, until: int = 100
) -> dict:
    pairs = synthetic_pairs(1, acceptance)
    made = forecaster(pairs[0], method, pairs if known else ())
    return made.load(pairs, lambda rows: STEP, draft, 20, until)


@pytest.mark.parametrize("method", ["SAGUARO", "DOUBLE"])
def test_a_perfect_draft_in_time_is_forecast_to_fill_every_step(method):
    timed = forecast(1.0, draft_times(STEP / 8), method)
    assert timed["tokens"] / timed["seconds"] == pytest.approx(K + 1)
    assert timed["kinds"]["hit"] >= 15


def test_a_draft_that_is_too_slow_is_forecast_to_give_nothing():
    """Nothing recurs in these texts: the datastore has no trees either."""
    timed = forecast(0.7, draft_times(50 * STEP), until=40)
    assert timed["tokens"] / timed["seconds"] < 1.3


@pytest.mark.parametrize(("known", "rate"), [(False, 2), (True, K + 1)])
def test_double_is_forecast_to_pass_its_speed_ratio_by_what_its_datastores_know(known, rate):
    timed = forecast(1.0, draft_times(STEP / 2), "DOUBLE", known)
    assert timed["tokens"] / timed["seconds"] == pytest.approx(rate)


def test_the_prefill_of_the_draft_model_counts():
    slow, quick = (forecast(1.0, draft_times(STEP / 8, seconds)) for seconds in (2.0, 0.0))
    assert sum(slow["kinds"].values()) > sum(quick["kinds"].values()) + 5


def test_a_second_load_begins_with_other_requests():
    pairs = synthetic_pairs(3, 1.0)
    made = forecaster(pairs[0])
    for chosen in (pairs[:1], pairs[1:]):
        timed = made.load(chosen, lambda rows: STEP, draft_times(STEP / 8), 20, 60)
        assert timed["tokens"] / timed["seconds"] == pytest.approx(len(chosen) * (K + 1))


def test_what_was_answered_is_not_known_the_second_time():
    pairs = synthetic_pairs(1, 0.7)
    made = forecaster(pairs[0])
    for _ in range(3):
        timed = made.load(pairs, lambda rows: STEP, draft_times(50 * STEP), 20, 60)
        assert timed["tokens"] / timed["seconds"] < 1.3


def test_a_forecast_has_the_rows_of_one_draft_process_and_the_requests_of_the_group():
    verified, drafted = [], []

    def step(rows):
        verified.append(rows)
        return STEP

    class Noting(DraftTimes):
        def forward(self, rows):
            drafted.append(rows)
            return STEP / 8

    pairs = synthetic_pairs(8, 0.9)
    times = Noting()
    times.learn(counters({}, {}, {}) | {"prefill": {"seconds": 0.0, "tokens": 1.0}, "rounds": {}})
    forecaster(pairs[0]).load(pairs, step, times, 10, 40)
    assert max(drafted) == ROWS
    assert set(verified) <= {len(pairs) * width for width in range(1, K + 2)}


# What the simulator takes as the models, the pairs and the prior, and the slots that it does not count.
NOT_SIMULATED = {"prior", "early_exit", "draft_tokens"}


def setup_of(variant: str, folder: Path, words: str = "", length: str = "static") -> Setup:
    told = f"--model m --draft d --pairs p --nodes 6 --rows 20 --phrase 5 --early-exit e {words}"
    given = parse(told.split() + ["--variants", "plain", "sssd", variant])
    return Setup(given, "float32", folder, length, {"EMULATED": "yes"})


@pytest.mark.parametrize("speed", ["", "--speed 3"])
@pytest.mark.parametrize("variant", BESIDE)
def test_a_forecast_has_the_options_that_are_served(variant, speed, tmp_path):
    length = "static" if speed else "adaptive"
    setup = setup_of(variant, tmp_path, speed, length)
    assert length_of(setup.given) == length
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    flags, _ = parser.parse_known_args(server_spec(variant, setup).command(1))
    served = {
        option.name: type(option.default)(value)
        for option in dataclasses.fields(Options)
        if (value := getattr(flags, f"specstore_{option.name}")) is not None
        and option.name not in NOT_SIMULATED
    }
    assert dataclasses.replace(Options(), **served) == forecast_options(setup.given, length)


@pytest.mark.parametrize("variant", VARIANTS)
def test_servers(variant, tmp_path):
    spec = server_spec(variant, setup_of(variant, tmp_path))
    words = spec.command(1)
    assert ("--speculative-draft-model-path" in words) == (variant in WITH_DRAFT)
    assert ("off" in words) == (variant in ("sssd", *BESIDE))
    assert ("--specstore-draft-phrase" in words) == (variant in BESIDE)
    assert ("--specstore-early-exit" in words) == (variant == "mirror")
    assert spec.environment["OMP_NUM_THREADS"] == "1" and spec.environment["EMULATED"] == "yes"


def test_speed_ratios_need_a_draft_process(capsys):
    words = "--model m --draft d --pairs p --speed 2 --variants plain sssd"
    assert parse(f"{words} double".split()).phrase == Options().draft_phrase
    with pytest.raises(SystemExit):
        parse(f"{words} standalone".split())
    assert "--speed" in capsys.readouterr().err


def test_the_shortest_prompts_with_long_answers():
    traces = by_length([SHIPPED], 64)
    lengths = [len(trace.prompt) for trace in traces]
    assert lengths == sorted(lengths) and len(lengths) > 24
    assert {len(trace.output) for trace in traces} == {64}


class NextNumber:
    """A model that goes on with the next number, but for one."""

    def __init__(self, wrong: int) -> None:
        self._wrong = wrong

    def __call__(self, ids):
        import torch

        return SimpleNamespace(logits=torch.nn.functional.one_hot(self._next(ids), 50).float())

    def generate(self, ids, max_new_tokens, **_):
        import torch

        for _ in range(max_new_tokens):
            ids = torch.cat([ids, self._next(ids[:, -1:])], dim=1)
        return ids

    def _next(self, ids):
        return ids + 1 + (ids == self._wrong)


def test_recorded_answers_become_the_targets_own():
    pytest.importorskip("torch")
    begin = np.arange(3, dtype=np.int32)
    traces = [Trace("any", begin, np.array(output, np.int32)) for output in ([3, 4, 5], [3, 5, 6])]
    for pair in pairs_of(NextNumber(-1), NextNumber(4), traces):
        assert pair.tokens.tolist() == [3, 4, 5] and pair.prompt.tolist() == [0, 1, 2]
        assert (pair.ranks() == 0).tolist() == [True, True, False]


RATES = {
    "plain": 1.0, "sssd": 2.0, "saguaro": 3.0, "double": 4.0, "standalone": 1.5, "saguaro_forecast": 2.85, "double_forecast": 5.0,
}  # fmt: skip


def group(speed: float, batch: int, number: int, variant: str) -> dict:
    rate = 1.5 if (speed, variant) == (2, "saguaro") else RATES[variant]
    record = {
        "speed": speed,
        "batch": batch,
        "group": number,
        "variant": variant,
        "seconds": 10.0,
        "steps": 10 * batch,
    }
    record["tokens"] = (10 + number) * rate * batch
    if variant in BESIDE:
        record["draft"] = {"lookups": {"hit": 3.0, "miss": 1.0}}
    return record | ({"kinds": {"hit": 1, "nothing": 1}} if variant in FORECASTS.values() else {})


def records() -> list[dict]:
    return [group(s, b, g, v) for s in (2, 8) for b in (1, 4) for g in range(3) for v in RATES]


def written(path: Path, records: list[dict]) -> Path:
    journal = Journal(path, {})
    for record in records:
        journal.add("group", record)
    return path


def test_the_table_says_what_was_measured_and_what_was_forecast(tmp_path):
    made = summarise(written(tmp_path / "journal", records()))
    rows = {(row["speed"], row["batch"], row["variant"]): row for row in made["rows"]}
    assert rows[8, 4, "saguaro"]["over_plain"].value == pytest.approx(3.0)
    assert rows[8, 4, "saguaro"]["over_sssd"].value == pytest.approx(1.5)
    assert rows[8, 4, "saguaro"]["forecast_over_measured"] == pytest.approx(0.95)
    assert rows[8, 4, "saguaro"]["hit_share"] == 0.75 and rows[8, 4, "saguaro_forecast"]["hit_share"] == 0.5
    assert rows[2, 1, "saguaro"]["forecast_over_measured"] == pytest.approx(1.9)
    assert rows[8, 4, "double"]["forecast_over_measured"] == pytest.approx(1.25)
    for row in made["break_even"]:  # .75 of SSSD at 2, 1.5 at 8
        assert (
            2 < row["saguaro"] < 8 and row["saguaro_forecast"] == row["double"] == row["double_forecast"] == 2
        )


def test_the_table_can_be_read(tmp_path):
    settings = {"speed": [2.0, 8.0], "rows": ROWS, "nodes": K, "model": "m", "draft": "d"}
    manifest = {"command": "beside", "settings": settings}
    record = json.loads(dumps({"manifest": manifest, **summarise(written(tmp_path / "journal", records()))}))
    plots.draw("named", record, tmp_path)
    assert [path.name for path in tmp_path.glob("*.png")] == ["named-ratios.png"]
    text = "\n".join(tables.tables(record))
    assert text.count("emulated") >= 5 and "**missed**" in text and "| met |" in text
    assert "DOUBLE is faster than SSSD" in text and "| DOUBLE, forecast |" in text
    real = tables.tables(record | {"manifest": {"settings": settings | {"speed": []}}})
    assert "emulated target" not in "\n".join(real)


def test_a_group_that_was_cut_off_does_not_count(tmp_path):
    cells = cells_of(journalled(written(tmp_path / "journal", records()[:-2]))[1]["group"])
    assert sum(len(rows) for groups in cells.values() for rows in groups.values()) == len(records()) - len(
        RATES
    )


def test_a_server_that_found_too_little_memory_is_an_error():
    server = SimpleNamespace(
        spec=SimpleNamespace(name="duo"), server_info=lambda: {"max_total_num_tokens": 2040}
    )
    check_room(server, 2040)
    with pytest.raises(RuntimeError, match="duo: there was memory for 2040 of 2041 KV tokens"):
        check_room(server, 2041)
