"""Methods of the registry on the virtual clocks: against each other, and DOUBLE against the ceiling of parallel speculation."""

import numpy as np
import pytest

from benchmarks.pipeline import methods
from benchmarks.pipeline.experiments import Question
from benchmarks.pipeline.methods import (
    AGAIN,
    ALONE,
    BOTH,
    NEITHER,
    NOTHING,
    contest,
    datastores,
    partly_known,
    played,
)
from benchmarks.pipeline.pairs import VOCABULARY, half_remembered, synthetic_pairs
from benchmarks.pipeline.simulation import Times
from benchmarks.pipeline.table import recorded_datastore
from benchmarks.pipeline.timelines import RATIO, SHOWN, timelines
from datastore_service.client.embedded import EmbeddedDatastore
from datastore_service.engine.limits import Limits
from sglang_patches.methods.registry import METHODS


def asked(pairs, ratio=4.0, datastore=None, lookahead=15, rows=1):
    times = Times(lambda rows: 1.0, lambda rows: 1.0 / ratio)
    return Question(times, lookahead, rows, 2.0, lambda case, batch: pairs, datastore)


def past_the_ceiling(acceptance, ratio, who, known=0.7, nodes=31):
    """Throughput over plain decoding."""
    pairs = synthetic_pairs(10, 200 + nodes + 1, acceptance, 0.6, 0.5, seed=2)
    store = partly_known(pairs, known)
    return played(asked(pairs, ratio, store, nodes), {}, 1, who).tokens_a_second


@pytest.mark.parametrize("ratio", [1.6, 2.8, 5.0])
def test_without_retrieval_the_speed_ratio_is_a_ceiling(ratio):
    speeds = [past_the_ceiling(acceptance, ratio, NEITHER) for acceptance in (0.6, 0.9, 1.0)]
    assert sorted(speeds) == speeds and speeds[-1] == pytest.approx(ratio, rel=0.02)
    assert speeds[-1] <= ratio * (1 + 1e-9)


@pytest.mark.parametrize("ratio", [1.6, 2.8, 5.0])
def test_retrieval_by_either_side_goes_past_the_ceiling_and_by_both_goes_furthest(ratio):
    found = {who: past_the_ceiling(0.97, ratio, who) for who in (*methods.WHO, ALONE)}
    assert found[NEITHER] < ratio < min(found[methods.DRAFT], found[methods.TARGET])
    assert max(found.values()) == found[BOTH]


def test_a_poor_draft_model_stays_below_the_ceiling_however_much_it_retrieves():
    """A cycle has at least one round, so below an acceptance of 1 - 1 / (gamma + C) no phrase is long enough; the target's retrieval may
    still go past it."""
    ratio, gamma = 4.7, 5
    assert 1 - 1 / (gamma + ratio) > 0.7
    assert past_the_ceiling(0.7, ratio, methods.DRAFT, known=1.0) < ratio


def test_retrieval_forwards_give_what_the_process_says():
    """The datastore knows the whole text, a draft model that is always right passes a whole phrase in each forward."""
    speed = past_the_ceiling(1.0, 2.0, methods.DRAFT, known=1.0, nodes=63)
    assert speed == pytest.approx(2 * (1 + methods.PHRASE), rel=0.1)


def test_what_is_known_of_synthetic_texts():
    pairs = synthetic_pairs(4, 5000, 0.5, 0.6, 0.5, seed=0)
    for copy, pair in zip(half_remembered(pairs, 0.7), pairs, strict=True):
        assert (copy == np.append(pair.prompt, pair.tokens)).mean() == pytest.approx(0.7, abs=0.03)


def test_what_the_datastore_has_served_before_is_what_it_drafts():
    pairs = synthetic_pairs(6, 100, 0.7, 0.6, 0.5, seed=3)
    make = recorded_datastore
    stored = {NOTHING: make(VOCABULARY, []), AGAIN: make(VOCABULARY, [], pairs)}
    rows = list(datastores(asked(pairs), [{"agreement": 0.7}], 1, lambda case: stored, ratios=[4.0]))
    found = {(row["method"], row["datastore"]): row for row in rows}
    alone = {name: found[ALONE, name]["tokens_a_step"].value for name in (methods.NONE, NOTHING, AGAIN)}
    assert alone[methods.NONE] == 1 and alone[NOTHING] == pytest.approx(1, abs=0.05) and alone[AGAIN] > 12
    assert (
        found["DOUBLE", NOTHING]["over_plain"].value > 1.5
        and found["DOUBLE", methods.NONE]["over_other"] is None
    )
    assert found["DOUBLE", methods.NONE]["over_alone"].value == pytest.approx(
        found["DOUBLE", methods.NONE]["over_plain"].value
    )
    assert found["DOUBLE", NOTHING]["over_other"].value == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("kept", [0, 1000])
def test_refused_tokens_are_told_to_the_one_datastore_that_keeps_them(monkeypatch, kept):
    step, told, stores = EmbeddedDatastore.step, [], set()

    def listen(self, entries, deadline):
        stores.add(self)
        told.extend(refused for entry in entries for refused in entry.rejected)
        return step(self, entries, deadline)

    monkeypatch.setattr(EmbeddedDatastore, "step", listen)
    store = recorded_datastore(VOCABULARY, [], limits=Limits(refusals=kept))
    played(asked(synthetic_pairs(3, 60, 0.7, 0.6, 0.5, seed=3), datastore=store), {}, 1, BOTH, shared=True)
    assert bool(told) == bool(kept) and len(stores) == 1


def test_every_method_is_played_and_one_is_compared_with_the_best():
    pairs = synthetic_pairs(8, 100, 0.8, 0.6, 0.5, seed=1)
    question = asked(pairs, 10.0, rows=24)
    rows = list(contest(question, [{}], [2], [8.0], lambda case, batch: {"known": partly_known(pairs, 0.4)}))
    speeds = {row["method"]: row["over_plain"].value for row in rows}
    without = {name for name, method in METHODS.items() if method.early_exit}  # synthetic pairs have none
    assert set(speeds) == set(METHODS) - without and speeds["SSSD"] < min(speeds["SAGUARO"], speeds["DOUBLE"])
    (last,) = (row for row in rows if "best" in row)
    assert all(0 <= row["hits_by_session"][0] <= row["hits_by_session"][2] <= 1 for row in rows)
    others = {name: speed for name, speed in speeds.items() if name != methods.AUTOMATIC}
    assert last["method"] == methods.AUTOMATIC and last["best"] == max(others, key=others.get)
    assert last["over_best"].value == pytest.approx(speeds[methods.AUTOMATIC] / others[last["best"]])


def test_plain_decoding_may_be_the_best():
    """Each drafted token makes a forward longer by as much as it takes without any, and nothing is right."""
    pairs = synthetic_pairs(6, 60, 0.01, 0.01, 0.01, seed=1)
    slow = Times(lambda rows: float(rows), lambda rows: 1.0)
    asked = Question(slow, 15, 24, 2.0, lambda case, batch: pairs)
    rows = list(contest(asked, [{}], [1], [1.0], lambda case, batch: {"nothing": partly_known(pairs, 1e-9)}))
    assert next(row["best"] for row in rows if "best" in row) == methods.PLAIN


def test_timelines_show_each_method_for_the_same_time():
    rows = list(
        timelines(asked(synthetic_pairs(20, 208, 0.8, 0.6, 0.5, seed=2), lookahead=7, rows=24), {}, 0.7)
    )
    assert [row["method"] for row in rows] == ["plain", *METHODS]
    end = 1e3 * SHOWN
    for row in rows:
        assert row["milliseconds"] == end and row["tokens"] >= SHOWN
        begins, ends, kinds, tokens = zip(*row["target"], strict=True)
        assert min(begins) >= 0 and max(ends) <= end and sum(tokens) == row["tokens"]
        assert all(after >= before for before, after in zip(ends, begins[1:], strict=False))
        drafts = METHODS[row["method"]].draft_parts if row["method"] in METHODS else None
        assert bool(row["draft"]) == bool(drafts)
        assert ("hit" in kinds) == bool(drafts)
        for begin, stop in row["draft"]:
            assert 0 <= begin < stop <= end and stop - begin <= 1e3 / RATIO + 1e-6
