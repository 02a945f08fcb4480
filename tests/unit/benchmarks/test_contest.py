"""All methods against each other, and the planner against fixed shapes, on the virtual clock."""

import json

import pytest

from benchmarks.pipeline import __main__ as command
from benchmarks.pipeline.drafts import PLANNER, against_shapes, shapes
from benchmarks.pipeline.experiments import Question
from benchmarks.pipeline.methods import AUTOMATIC, PLAIN, contest, partly_known
from benchmarks.pipeline.pairs import save, synthetic_pairs
from benchmarks.pipeline.simulation import Times
from sglang_patches.methods.registry import METHODS


def question(pairs):
    times = Times(lambda rows: 1.0, lambda rows: 0.1)
    return Question(times, 15, 24, 2.0, lambda case, batch: pairs)


def test_every_method_is_played_and_one_is_compared_with_the_best():
    pairs = synthetic_pairs(8, 100, 0.8, 0.6, 0.5, seed=1)
    rows = list(
        contest(question(pairs), [{}], [2], [8.0], lambda case, batch: {"known": partly_known(pairs, 0.4)})
    )
    speeds = {row["method"]: row["over_plain"].value for row in rows}
    without = {name for name, method in METHODS.items() if method.early_exit}  # synthetic pairs have none
    assert set(speeds) == set(METHODS) - without and speeds["SSSD"] < min(speeds["SAGUARO"], speeds["DOUBLE"])
    (last,) = (row for row in rows if "best" in row)
    assert all(0 <= row["hits_by_session"][0] <= row["hits_by_session"][2] <= 1 for row in rows)
    others = {name: speed for name, speed in speeds.items() if name != AUTOMATIC}
    assert last["method"] == AUTOMATIC and last["best"] == max(others, key=others.get)
    assert last["over_best"].value == pytest.approx(speeds[AUTOMATIC] / others[last["best"]])


def test_plain_decoding_may_be_the_best():
    """Each drafted token makes a forward longer by as much as it takes without any, and nothing is right."""
    pairs = synthetic_pairs(6, 60, 0.01, 0.01, 0.01, seed=1)
    asked = Question(
        Times(lambda rows: float(rows), lambda rows: 1.0), 15, 24, 2.0, lambda case, batch: pairs
    )
    rows = list(contest(asked, [{}], [1], [1.0], lambda case, batch: {"nothing": partly_known(pairs, 1e-9)}))
    assert next(row["best"] for row in rows if "best" in row) == PLAIN


def test_the_planner_is_behind_no_fixed_shape():
    pairs = synthetic_pairs(8, 60, 0.7, 0.6, 0.5, seed=1)
    rows = list(against_shapes(question(pairs), [{}], 1, [8.0]))
    assert {row["shape"] for row in rows} == set(shapes())
    assert all(row["planner_over"].high >= 1 for row in rows if row["shape"] != PLANNER)
    found = {row["shape"]: row["tokens_a_step"].value for row in rows}
    assert found["dynamic, gamma = 0.25 C"] < found["dynamic split"]


@pytest.mark.parametrize("recorded", [False, True])
def test_the_command_tabulates_both(tmp_path, capsys, recorded):
    words = "--ask methods shapes --lookahead 15 --tokens 200 --acceptance 0.8 --vocab-size 50000 --speed 6 --batch 1"
    if recorded:
        save(tmp_path / "a.npz", synthetic_pairs(3, 60, 0.8, 0.6, 0.5, 0), load="mixed", agreement=0.8)
        words += f" --pairs {tmp_path / 'a.npz'}"
    command.main([*words.split(), "--json", str(tmp_path / "contest.json")])
    shown = capsys.readouterr().out
    assert "hits by session" in " ".join(shown.split())
    assert "All methods" in shown and "The planner against fixed shapes" in shown
    made = json.loads((tmp_path / "contest.json").read_text())
    assert {row["shape"] for row in made["shapes"]} == set(shapes())
    assert {row["load"] for row in made["methods"]} == (
        {"mixed", "repeated"} if recorded else {"partly known"}
    )
