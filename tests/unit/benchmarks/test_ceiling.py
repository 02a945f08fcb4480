"""DOUBLE on the virtual clock against the ceiling of parallel speculation."""

import json

import numpy as np
import pytest

from benchmarks.pipeline import __main__ as command
from benchmarks.pipeline.experiments import Question
from benchmarks.pipeline.methods import (
    AGAIN,
    ALONE,
    BOTH,
    DRAFT,
    NEITHER,
    NONE,
    NOTHING,
    PHRASE,
    TARGET,
    WHO,
    datastores,
    partly_known,
    played,
)  # fmt: skip
from benchmarks.pipeline.pairs import VOCABULARY, half_remembered, save, synthetic_pairs
from benchmarks.pipeline.simulation import Times
from benchmarks.pipeline.table import recorded_datastore
from benchmarks.report import plots
from datastore_service.client.embedded import EmbeddedDatastore
from datastore_service.engine.limits import Limits


def past_the_ceiling(acceptance, ratio, who, known=0.7, nodes=31):
    """Throughput over plain decoding."""
    pairs = synthetic_pairs(10, 200 + nodes + 1, acceptance, 0.6, 0.5, seed=2)
    store = partly_known(pairs, known)
    times = Times(lambda rows: 1.0, lambda rows: 1.0 / ratio)
    asked = Question(times, nodes, 1, 2.0, lambda case, batch: pairs, store)
    return played(asked, {}, 1, who).tokens_a_second


@pytest.mark.parametrize("ratio", [1.6, 2.8, 5.0])
def test_without_retrieval_the_speed_ratio_is_a_ceiling(ratio):
    speeds = [past_the_ceiling(acceptance, ratio, NEITHER) for acceptance in (0.6, 0.9, 1.0)]
    assert sorted(speeds) == speeds and speeds[-1] == pytest.approx(ratio, rel=0.02)
    assert speeds[-1] <= ratio * (1 + 1e-9)


@pytest.mark.parametrize("ratio", [1.6, 2.8, 5.0])
def test_retrieval_by_either_side_goes_past_the_ceiling_and_by_both_goes_furthest(ratio):
    found = {who: past_the_ceiling(0.97, ratio, who) for who in (*WHO, ALONE)}
    assert found[NEITHER] < ratio < min(found[DRAFT], found[TARGET])
    assert max(found.values()) == found[BOTH]


def test_a_poor_draft_model_stays_below_the_ceiling_however_much_it_retrieves():
    """A cycle has at least one round, so below an acceptance of 1 - 1 / (gamma + C) no phrase is long enough; the target's retrieval may
    still go past it."""
    ratio, gamma = 4.7, 5
    assert 1 - 1 / (gamma + ratio) > 0.7
    assert past_the_ceiling(0.7, ratio, DRAFT, known=1.0) < ratio


def test_retrieval_forwards_give_what_the_process_says():
    """The datastore knows the whole text, a draft model that is always right passes a whole phrase in each forward."""
    speed = past_the_ceiling(1.0, 2.0, DRAFT, known=1.0, nodes=63)
    assert speed == pytest.approx(2 * (1 + PHRASE), rel=0.1)


def test_what_is_known_of_synthetic_texts():
    pairs = synthetic_pairs(4, 5000, 0.5, 0.6, 0.5, seed=0)
    for copy, pair in zip(half_remembered(pairs, 0.7), pairs, strict=True):
        assert (copy == np.append(pair.prompt, pair.tokens)).mean() == pytest.approx(0.7, abs=0.03)


@pytest.mark.parametrize("recorded", [False, True])
def test_the_command_answers_and_its_record_is_drawn(tmp_path, capsys, recorded):
    words = "--ask ceiling --lookahead 15 --tokens 200 --acceptance 0.8 0.95 --vocab-size 50000"
    if recorded:
        save(tmp_path / "a.npz", synthetic_pairs(3, 60, 0.8, 0.6, 0.5, 0), agreement=0.8, temperature=0)
        words += f" --pairs {tmp_path / 'a.npz'}"
    command.main([*words.split(), "--json", str(tmp_path / "double.json")])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Past the ceiling" in shown and "guesses a step" not in shown
    assert ("Recorded answers" if recorded else "70% are right") in shown
    plots.draw("double", json.loads((tmp_path / "double.json").read_text()), tmp_path)
    assert (tmp_path / "double-ceiling.png").exists()


def asked(pairs, ratio=4.0, datastore=None):
    times = Times(lambda rows: 1.0, lambda rows: 1.0 / ratio)
    return Question(times, 15, 1, 2.0, lambda case, batch: pairs, datastore)


def test_what_the_datastore_has_served_before_is_what_it_drafts():
    pairs = synthetic_pairs(6, 100, 0.7, 0.6, 0.5, seed=3)
    make = recorded_datastore
    stored = {NOTHING: make(VOCABULARY, []), AGAIN: make(VOCABULARY, [], pairs)}
    rows = list(datastores(asked(pairs), [{"agreement": 0.7}], 1, lambda case: stored, ratios=[4.0]))
    found = {(row["method"], row["datastore"]): row for row in rows}
    alone = {name: found[ALONE, name]["tokens_a_step"].value for name in (NONE, NOTHING, AGAIN)}
    assert alone[NONE] == 1 and alone[NOTHING] == pytest.approx(1, abs=0.05) and alone[AGAIN] > 12
    assert found["DOUBLE", NOTHING]["over_plain"].value > 1.5 and found["DOUBLE", NONE]["over_other"] is None
    assert found["DOUBLE", NONE]["over_alone"].value == pytest.approx(
        found["DOUBLE", NONE]["over_plain"].value
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


def test_the_command_compares_datastores_of_recorded_pairs_only(tmp_path, capsys):
    words = ["--ask", "datastores", "--lookahead", "15", "--vocab-size", "50000"]
    with pytest.raises(SystemExit):
        command.main(words)
    save(tmp_path / "a.npz", synthetic_pairs(3, 60, 0.8, 0.6, 0.5, 0), agreement=0.8, temperature=0)
    command.main([*words, "--pairs", str(tmp_path / "a.npz"), "--json", str(tmp_path / "stores.json")])
    assert "By what the datastore has seen" in capsys.readouterr().out
    made = json.loads((tmp_path / "stores.json").read_text())
    assert {"prior.jsonl.gz", "french.jsonl.gz"} < set(made["manifest"]["prompts"])
    assert len(made["datastores"]) == 24
