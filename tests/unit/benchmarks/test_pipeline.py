"""The simulation of drafting beside the target against what theory says of it."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from benchmarks.pipeline import __main__ as command
from benchmarks.pipeline import record, simulation, theory
from benchmarks.pipeline import tables as pipelining
from benchmarks.pipeline.experiments import (
    FAN_OUT,
    LENGTHS,
    Question,
    break_even,
    chained,
    critical,
    misses,
)
from benchmarks.pipeline.pairs import CHOICES, load, recorded, save, synthetic, synthetic_pairs
from benchmarks.pipeline.simulation import (
    FELL_BACK,
    HIT,
    NOTHING,
    WAITED,
    Pipeline,
    Setting,
    Tally,
    Times,
    rate_of,
)
from benchmarks.pipeline.theory import chain_tokens
from benchmarks.report.records import dumps
from benchmarks.report.statistics import Interval
from datastore_service.client.embedded import EmbeddedDatastore
from datastore_service.engine.engine import Engine
from sglang_patches.draft_side.side import DraftParts, DraftSide, Learner
from sglang_patches.drafting.seams import NoFallback
from sglang_patches.methods.saguaro import GeometricFanOut, Rollouts, WaitingFallback
from sglang_patches.options import Options

K = 5
STEP, DRAFT = 1.0, 0.05
TIMES = Times(lambda rows: STEP, lambda rows: DRAFT)


def question(acceptance=0.8, times=TIMES, **changes):
    tokens = changes.pop("tokens", 1500)

    def pairs(_, batch):
        count = max(10, 2 * batch)
        return synthetic_pairs(count, tokens // count + K + 1, acceptance, 0.6, 0.5, seed=1)

    return Question(times, **{"lookahead": K, "draft_rows": 10, "e_miss": 2.0, "pairs": pairs} | changes)


def test_the_clock_is_deterministic():
    first, second = (question().tally({}, 3) for _ in range(2))
    assert first == second and len(first.parts) == 8


def test_every_pair_is_played_to_its_end_and_counted_once():
    asked = question()
    for batch in (1, 4):
        tally = asked.tally({}, batch)
        pairs = asked.pairs({}, batch)[-len(tally.parts) :]
        for part, pair in zip(tally.parts, pairs, strict=True):
            assert len(pair) - 3 * (K + 1) < part.tokens.total() <= len(pair)
        assert tally.seconds == pytest.approx(sum(part.seconds for part in tally.parts))
        assert 0 < tally.steps.total() * STEP / batch <= tally.seconds * (1 + 1e-9)


def test_a_draft_that_is_always_right_and_in_time_gives_a_whole_chain_every_step():
    tally = question(acceptance=1.0).tally({}, 2)
    assert tally.hit_rate == 1 and tally.hidden == pytest.approx(1)
    assert tally.tokens_a_second == pytest.approx(2 * (K + 1) / STEP)


@pytest.mark.parametrize("draft", [STEP / (K - 1), STEP / 2, 2 * STEP])
def test_a_draft_that_is_too_slow_gives_as_much_as_it_has_time_for(draft):
    """Always right, one token a forward: the target emits what was drafted meanwhile and its own."""
    times = Times(lambda rows: STEP, lambda rows: draft)
    tally = question(acceptance=1.0, times=times).tally({}, 1, fallback="none")
    assert 1 / STEP <= tally.tokens_a_second <= 1 / STEP + 1 / draft
    assert tally.tokens_a_step() < K + 1


@pytest.mark.parametrize("fallback", ["none", "datastore", "wait"])
@pytest.mark.parametrize("acceptance", [0.6, 0.85])
def test_theorem_7(acceptance, fallback):
    tally = question(acceptance=acceptance, tokens=3200).tally({}, 1, fallback=fallback)
    waited = tally.waiting / max(1, tally.steps[WAITED]) / STEP
    assert waited == pytest.approx(K * DRAFT if fallback == "wait" else 0, rel=0.1)
    e_miss = tally.tokens_a_step(WAITED, FELL_BACK, NOTHING)
    expected = theory.speedup(tally.hit_rate, tally.tokens_a_step(HIT), e_miss, 0.5, waited)
    assert tally.tokens_a_second * STEP == pytest.approx(expected, rel=0.02)


def test_corollary_16():
    """All of a batch wait for one."""
    batch, tally = 4, question(tokens=4800).tally({}, 4, fallback="wait")
    e_miss = tally.tokens_a_step(WAITED)
    expected = theory.speedup(tally.hit_rate, tally.tokens_a_step(HIT), e_miss, 0.5, K * DRAFT, batch)
    assert tally.tokens_a_second * STEP / batch == pytest.approx(expected, rel=0.03)


def test_equation_1():
    tally = question(tokens=4000).tally({}, 1)
    after = {
        kind: tally.after[kind, HIT] / sum(tally.after[kind, to] for to in (HIT, FELL_BACK))
        for kind in (HIT, FELL_BACK)
    }
    assert theory.hit_rate(after[HIT], after[FELL_BACK]) == pytest.approx(tally.hit_rate, abs=0.005)


def test_hits_give_what_a_chain_gives():
    tally = question(acceptance=0.7, tokens=4800).tally({}, 1)
    assert tally.tokens_a_step(HIT) == pytest.approx(chain_tokens(0.7, K), rel=0.08)
    assert tally.tokens_a_step(FELL_BACK) == pytest.approx(2.0, rel=0.15)


def test_batches_beyond_b_star_do_not_wait():
    """The direction of Theorem 17; the rule that decides by it is about as good as the better of the two."""
    asked = question(times=Times(lambda rows: STEP, lambda rows: 0.1), tokens=3200)
    assert 1 < critical(asked, {}, "none") < 16
    for batch, waiting_is_better in ((1, True), (16, False)):
        names = ("none", "wait", "datastore", "by b*")
        speed = {name: asked.tally({}, batch, fallback=name).tokens_a_second for name in names}
        assert (speed["wait"] > speed["none"]) is waiting_is_better
        assert speed["by b*"] > 0.96 * max(speed["wait"], speed["datastore"])


def test_guesses_are_worth_more_where_the_path_ends():
    """Seven positions, of which the later ones are hardly reached."""
    asked = question(acceptance=0.5, lookahead=7, draft_rows=16, tokens=2000)
    hits = {name: asked.tally({}, 1, name, "none").hit_rate for name in FAN_OUT}
    assert hits["geometric"] > hits["uniform"] + 0.02
    assert hits["likeliest"] > hits["uniform"] + 0.02


@pytest.mark.parametrize("batch", [1, 16])
def test_the_rows_of_a_draft_forward_are_those_of_the_product_over_all_requests(batch):
    seen = []

    def forward(rows):
        seen.append(rows)
        return DRAFT

    question(times=Times(lambda rows: STEP, forward), draft_rows=24, tokens=800).tally({}, batch)
    assert max(seen) == 24 if batch > 1 else max(seen) <= 24
    assert command.parse([]).draft_rows == Options().draft_rows


@pytest.mark.parametrize("batch", [1, 8])
def test_the_guesses_of_a_step_are_those_of_the_product_over_all_requests(batch, monkeypatch):
    made = []

    class Noting(DraftSide):
        def __init__(self, model, parts, rows, outcomes):
            made.append((rows, outcomes))
            super().__init__(model, parts, rows, outcomes)

    monkeypatch.setattr(simulation, "DraftSide", Noting)
    question(draft_rows=24, tokens=200).tally({}, batch)
    assert made == [(24, 24)]


def test_the_better_of_a_short_draft_and_the_datastore_s_tree_is_verified():
    """At a ratio of 2 there is time for hardly more than the guess itself, which is worth less than what the datastore gives."""
    asked = at_speed(2, acceptance=0.7, tokens=3200)
    alone, beside = asked.datastore_alone({}, 1), asked.tally({}, 1)
    assert beside.hit_rate > 0.5
    assert beside.tokens_a_second > 0.95 * alone.tokens_a_second


def test_the_hits_of_the_sessions_are_the_hits_of_all():
    tally = question().tally({}, 4)
    assert sum(tally.each("hits")) == tally.steps[HIT]
    least, median, most = tally.hits_by_session
    assert 0 < least < tally.hit_rate < most < 1 and least <= median <= most
    (row,) = question().rows({}, 4, "fallback", ["datastore"])
    assert row["hits_by_session"] == (least, median, most)


def test_a_session_that_is_never_drafted_for_is_seen():
    served, starved = Tally(Counter({HIT: 8, NOTHING: 2})), Tally(Counter({FELL_BACK: 10}))
    found = Tally.of([served, served, starved], hidden=0.0)
    assert found.hits_by_session == (0.0, 0.8, 0.8) and found.hit_rate == pytest.approx(16 / 30)


def at_speed(ratio, **changes):
    return question(times=Times(lambda rows: STEP, lambda rows: STEP / ratio), **changes)


@pytest.mark.parametrize("ratio", [1, 2, 8, 32])
def test_synchronous_drafting_has_its_best_length(ratio):
    asked = at_speed(ratio, tokens=4000)
    pairs = asked.pairs({}, 1)[2:]
    speeds = {}
    for length in LENGTHS:
        emitted, steps = (sum(of) for of in zip(*(chained(pair, length) for pair in pairs), strict=True))
        speeds[length] = emitted / (steps * (STEP + length * STEP / ratio))
    found = asked.synchronous({}, 1)
    assert found.tokens_a_second == pytest.approx(max(speeds.values()))
    assert found.lookahead == max(speeds, key=speeds.get)


def test_the_best_length_grows_with_the_speed_ratio_and_is_the_one_that_theory_has():
    lengths = [at_speed(ratio, tokens=8000).synchronous({}, 1).lookahead for ratio in (1, 2, 8, 32)]
    assert lengths == sorted(lengths) and lengths[0] < K < lengths[-1]
    for ratio, length in zip((1, 2, 8, 32), lengths, strict=True):
        rates = {k: chain_tokens(0.8, k) / (1 + k / ratio) for k in LENGTHS}
        assert rates[length] > 0.98 * max(rates.values())


def test_the_best_length_is_no_chance_of_the_pairs():
    """It is about as good for other pairs as the length that is best for those."""
    for ratio in (2, 8):
        asked = at_speed(ratio, tokens=4000)
        others = replace(asked, pairs=lambda case, batch: synthetic_pairs(10, 400, 0.8, 0.6, 0.5, seed=2))
        chosen, best = asked.synchronous({}, 1).lookahead, others.synchronous({}, 1)
        counts = [chained(pair, chosen) for pair in others.pairs({}, 1)[2:]]
        emitted, steps = (sum(of) for of in zip(*counts, strict=True))
        assert emitted / (steps * (STEP + chosen * STEP / ratio)) > 0.98 * best.tokens_a_second


def test_the_datastore_alone_verifies_no_more_than_pays():
    """Where rows cost nothing the longest tree is best, and where they cost as much as the step a short one."""
    free = question().datastore_alone({}, 16)
    dear = question(times=Times(lambda rows: STEP * (1 + rows / 64), lambda rows: DRAFT)).datastore_alone(
        {}, 16
    )
    assert free.lookahead == LENGTHS[-1] and 1 <= dear.lookahead < K
    assert dear.tokens_a_second > 2.0 / (STEP * (1 + 16 * (K + 1) / 64)) * 16
    rate = rate_of(2.0, K)
    assert chain_tokens(rate, K) == pytest.approx(2.0)
    assert dear.tokens[0] == pytest.approx(chain_tokens(rate, dear.lookahead))


def test_a_real_datastore_alone_has_its_best_length():
    pairs = [
        replace(pair, tokens=pair.tokens % 1000) for pair in synthetic_pairs(10, 60, 0.8, 0.6, 0.5, seed=1)
    ]
    dear = Times(lambda rows: STEP * (1 + rows), lambda rows: DRAFT)
    asked = question(
        times=dear, pairs=lambda case, batch: pairs, datastore=lambda: EmbeddedDatastore(lambda: Engine(1000))
    )
    assert (
        asked.datastore_alone({}, 2).lookahead == 1
    )  # nothing recurs: each row costs a step, and gives nothing


def test_drafting_beside_the_target_beats_drafting_before_it():
    (row,) = question(tokens=12000).rows({}, 1, "fallback", ["datastore"])
    drafting = row["synchronous_lookahead"] * DRAFT
    e_sync = row["synchronous_over_plain"].value * (1 + drafting)
    least, most = theory.sandwich(row["hit_rate"].value, chain_tokens(0.8, K), e_sync, drafting)
    assert max(1, least) < row["over_synchronous"].value < most and row["hidden"] > 0.95
    expected = chain_tokens(0.8, row["synchronous_lookahead"]) / (1 + drafting)
    assert row["synchronous_over_plain"].value == pytest.approx(expected, rel=0.05)


def test_what_the_draft_side_does_around_its_forwards_takes_drafting_time():
    def tokens(draft, around=0.0):
        times = Times(lambda rows: STEP, lambda rows: draft, around=around)
        return question(acceptance=1.0, times=times).tally({}, 1, fallback="none").tokens_a_step()

    slower = tokens(STEP / 2)
    assert tokens(STEP / 4, STEP / 4) == pytest.approx(slower, rel=0.05)
    assert slower < 0.8 * tokens(STEP / 4)


def test_messages_that_take_longer_than_a_step_miss():
    late = question(times=Times(lambda rows: STEP, lambda rows: DRAFT, delay=2 * STEP)).tally(
        {}, 1, fallback="none"
    )
    assert late.hit_rate < 0.5 * question().tally({}, 1, fallback="none").hit_rate


def test_misses_fall_by_the_power_law_of_the_pair():
    asked = question(acceptance=0.0, lookahead=1, e_miss=1.5, tokens=3200)
    found = misses(asked, {}, fan_outs=(1, 2, 4, 8))
    law = found["exponents"][HIT]
    assert law.low < 0.6 + 0.1 and law.high > 0.6 - 0.1
    rates = [row["miss_rate"] for row in found["rows"] if row["after"] == HIT]
    assert all(later.value < earlier.value for earlier, later in zip(rates, rates[1:], strict=False))
    assert all(rate.low <= rate.value <= rate.high for rate in rates)


def test_the_table_of_misses_says_which_recorded_pairs_they_are_of():
    found = misses(question(tokens=1600), {"load": "mixed", "agreement": 0.8}, fan_outs=(1, 2, 4, 8))
    shown = "\n".join(pipelining.misses(json.loads(dumps({"misses": found}))["misses"]))
    assert "agreement 0.8, load mixed" in shown


def test_synthetic_pairs_are_what_they_are_said_to_be():
    pair = synthetic(np.random.default_rng(0), 50_000, 0.7, 0.6, 0.5)
    ranks = pair.ranks()
    assert (ranks == 0).mean() == pytest.approx(0.7, abs=0.01)
    for guesses in (1, 4, 16):
        missed = (ranks[ranks > 0] > guesses).mean()
        assert missed == pytest.approx(0.5 * guesses**-0.6, abs=0.015)
        assert 1 - pair.probabilities[0, : guesses + 1].sum() == pytest.approx(0.3 * missed, abs=0.01)
    assert all(len(set(row)) == CHOICES for row in pair.choices[:100].tolist())


def test_the_answers_of_some_categories_are_left_out():
    given = record.parse(["--temperature", "0", "--without", "french", "translation", "--out", "pairs"])
    ((temperature, requests),) = record.target_answers(given)
    assert temperature == 0 and len(requests) == 48


def test_recorded_pairs_come_back_from_their_file(tmp_path):
    table = np.random.default_rng(0).dirichlet(np.ones(100), 100).astype(np.float32)

    def choose(text):
        order = np.argsort(-table[text], axis=1)
        return order, np.take_along_axis(table[text], order, 1)

    def expect(text):
        return tuple(array[:, 1:4] for array in choose(text))

    exits = {5: expect, 15: choose}
    pairs = [recorded([1, 2], [3, 4, 5], choose, exits), recorded([7], [8], choose, exits)]
    assert pairs[0].prompt.tolist() == [1, 2]
    assert pairs[0].tokens.tolist() == [3, 4, 5]
    assert pairs[0].choices[0, 0] == table[2].argmax() and pairs[0].choices[2, 0] == table[4].argmax()
    assert pairs[0].probabilities[0].tolist() == sorted(table[2].tolist(), reverse=True)[:CHOICES]
    save(tmp_path / "p.npz", pairs, temperature=0.5)
    read_back, what = load(tmp_path / "p.npz")
    assert what == {"temperature": 0.5}
    for made, read in zip(pairs, read_back, strict=True):
        for field in ("prompt", "tokens", "choices", "probabilities"):
            assert (getattr(made, field) == getattr(read, field)).all()
        assert list(read.exits) == [5, 15] and read.exits[5][0].dtype == np.int32
        for layer, arrays in made.exits.items():
            for array, same in zip(arrays, read.exits[layer], strict=True):
                assert (array == same).all()
    np.savez(tmp_path / "q.npz", tokens=[1])
    with pytest.raises(ValueError, match="choices"):
        load(tmp_path / "q.npz")


def test_the_end_of_an_answer_makes_place_for_the_next():
    pairs = [synthetic(np.random.default_rng(at), 40, 0.8, 0.6, 0.5) for at in range(3)]
    waiting = partial(WaitingFallback, NoFallback(), K, 10.0)
    parts = DraftParts(lambda: Learner(GeometricFanOut(), Rollouts(K)))
    setting = Setting(TIMES, K, 16, lambda now: parts, lambda around: waiting())
    tally = Pipeline(setting, pairs, 2).run()
    assert len(tally.parts) == 3 and all(part.tokens.total() > 20 for part in tally.parts)


@pytest.mark.parametrize(
    ("above", "speed"),
    [
        ([0.5, 0.9, 1.1], 2 * 2**0.5),
        ([1.2, 1.3, 1.4], 1),
        ([0.1, 0.2, 0.3], None),
        ([1.1, 0.9, 1.1], 2 * 2**0.5),
    ],
)
def test_break_even(above, speed):
    rows = [
        {"speed": at, "over": Interval(value, None, None)} for at, value in zip((1, 2, 4), above, strict=True)
    ]
    assert break_even(rows, "over") == (speed and pytest.approx(speed))


def test_without_hits_there_is_nothing_to_compare_them_with():
    nothing, some = Tally(parts=[Tally()]), Tally(parts=[Tally(Counter({HIT: 3}), seconds=1.0)])
    assert some.over(nothing, "hits") is None
    assert pipelining.cell(None) == "–"
