"""`python -m benchmarks.edits`: its tasks, what each way says, and how answers are summed up."""

from __future__ import annotations

import pytest

from benchmarks.edits import (
    BEGINNING,
    KINDS,
    SERVER_OF,
    WAYS,
    parse,
    played,
    read_tasks,
    specs,
    summarised,
    turns_of,
    wishes,
)
from benchmarks.report.page import tables_of


@pytest.mark.parametrize(("kind", "lines"), zip(KINDS, ((40, 90), (285, 320)), strict=True))
def test_tasks_are_files_with_two_edits(kind, lines):
    for task in read_tasks(kind):
        assert lines[0] <= len(task["before"].splitlines()) <= lines[1]
        first, second = turns_of(task)
        assert first.before != first.after and second.before != second.after
        assert (first.before, first.after, second.before) == (task["before"], task["after"][0], first.after)
        assert [message["role"] for message in second.messages] == ["user", "assistant", "user"]
        shown, answered, asked = (message["content"] for message in second.messages)
        assert first.after in shown and answered in shown, "the model said what it was asked to repeat"
        assert second.after in asked and answered.startswith(BEGINNING)


def test_a_way_says_what_its_name_says():
    task, other = read_tasks("short")[:2]
    for turn in turns_of(task):
        said = {way: wishes(way, turn, other["before"]) for way in WAYS}
        assert [way for way in WAYS if said[way]] == [*SERVER_OF]
        told = {way: said[way]["custom_params"]["specstore"] for way in SERVER_OF}
        assert {way: of["reference"] for way, of in told.items() if "reference" in of} == {
            "prediction": turn.before,
            "prediction alone": turn.before,
            "wrong prediction": other["before"],
        }
        assert [way for way, of in told.items() if "draft" in of] == ["prediction alone"]


def test_no_way_needs_another_ways_server(tmp_path):
    assert set(specs(WAYS, tmp_path, "float32")) == {"plain", "ngram", "sssd"}
    assert set(specs(["prediction", "session"], tmp_path, "float32")) == {"sssd"}


def test_ways_take_turns_and_are_compared_task_by_task():
    seconds = {"plain": 4.0, "session": 2.0, "prediction": 1.0}

    def ask(way, turn, other):
        assert other != turn.before
        row = {"tokens": 40, "steps": 40 if way == "plain" else 10, "timed": 32, "seconds": seconds[way]}
        return {"way": way, "task": turn.task, "turn": turn.number} | row

    tasks = read_tasks("short")[:3]
    rows = list(played(tasks, list(seconds), ask))
    assert [row["way"] for row in rows[::6]] == ["plain", "session", "prediction"], "each begins once"
    found = {row.pop("way"): row for row in summarised(rows)}
    assert found["prediction"]["tokens_per_step"].value == 4
    assert found["prediction"]["over_plain"].value == 4 and found["prediction"]["over_session"].value == 2
    assert "over_plain" not in summarised([row for row in rows if row["way"] != "plain"])[0]


def test_its_table():
    settings = vars(parse(["--model", "m", "--dtype", "float32"]))
    ratio = {"value": 4.0, "low": 3.5, "high": 4.5}
    results = [{"way": "prediction", "tokens_per_step": ratio, "over_plain": ratio}]
    lines = tables_of({"manifest": {"command": "edits", "settings": settings}, "results": results})
    assert "| prediction | 4.00 [3.50, 4.50] | 4.00 [3.50, 4.50] |" in lines
