"""`python -m benchmarks.predictions`: what each way sends, and how the ways are compared."""

from __future__ import annotations

import difflib

import pytest

from benchmarks.predictions import ANOTHER, NONE, PLAIN, edited, parse, played, predictions, summarised
from benchmarks.report.page import tables_of

TEXTS = [" ".join(f"{name}{place}" for place in range(300)) for name in "abc"]


@pytest.mark.parametrize("edits", [0, 1, 2, 3, 24])
def test_a_text_differs_by_its_edits(edits):
    before, after = TEXTS[0].split(" "), edited(TEXTS[0], edits, seed=1).split(" ")
    changes = [
        kind
        for kind, *_ in difflib.SequenceMatcher(None, before, after, False).get_opcodes()
        if kind != "equal"
    ]
    assert edits * 0.8 <= len(changes) <= edits, "two that touch are one"


def test_a_way_sends_what_its_name_says():
    for place in range(len(TEXTS)):
        sent = predictions(TEXTS, place, [2, 9])
        assert sent.keys() == {PLAIN, NONE, ANOTHER, "2 edits", "9 edits"}
        assert sent[PLAIN] is sent[NONE] is None
        assert sent[ANOTHER] in TEXTS and sent[ANOTHER] != TEXTS[place]
        assert sent["2 edits"] == edited(TEXTS[place], 2, place)


def asked(place, way, prediction):
    seconds = {NONE: 4.0, ANOTHER: 5.0}.get(way, 1.0)
    return {"tokens": 40, "steps": 10, "timed": 32, "seconds": seconds, "answer": [place]}


def test_ways_take_turns_and_are_compared_with_none():
    rows = list(played(TEXTS, [2], asked))
    assert [row["way"] for row in rows[::4]] == [PLAIN, NONE, ANOTHER], "each text begins with another"
    found = {row["way"]: row for row in summarised(rows)}
    assert found["2 edits"]["tokens_per_step"].value == 4 and found["2 edits"]["over_none"].value == 4
    assert found[ANOTHER]["over_none"].value == 0.8


def test_an_answer_that_depends_on_the_prediction_ends_the_run():
    with pytest.raises(RuntimeError, match="text 0"):
        list(played(TEXTS, [2], lambda place, way, sent: asked(place, way, sent) | {"answer": [way]}))


def test_its_table():
    settings = vars(parse(["--dtype", "float32"]))
    ratio = {"value": 4.0, "low": 3.5, "high": 4.5}
    results = [{"way": "4 edits", "tokens_per_step": ratio, "over_none": ratio}]
    lines = tables_of({"manifest": {"command": "predictions", "settings": settings}, "results": results})
    assert "| 4 edits | 4.00 [3.50, 4.50] | 4.00 [3.50, 4.50] |" in lines
