"""Which part of the draft's time lay beside the target's forwards, on hand-made traces."""

import numpy as np
import pytest

from benchmarks.draft_trace import events
from benchmarks.draft_trace.overlap import VERIFY, Spoken, answers, messages, shares, spoken, timeline
from benchmarks.draft_trace.replay import LookedUp
from benchmarks.report import drafting, plots
from sglang_patches.drafting.messages import Closed, Expected, Growth

NOTHING = events.framed([])


def target(began, end, mode=VERIFY):
    return events.Forward(began, end, mode, 1, 5)


def drafted(began, end, answers=()):
    forward = events.DraftForward(began, end, [("s", 1)], [None])
    return events.Worked(began, end, [True], forward, None, False, events.framed(answers))


def prefilled(began, end):
    return events.Worked(began, end, [], None, (True, began, end), False, NOTHING)


def waited(began, end, patience=1.0, answers=()):
    return events.Collected(began, end, patience, events.framed(answers))


def growth(turn):
    nodes = np.array([1])
    return Growth("s", 1, turn, nodes, nodes, nodes.astype(np.int32), np.ones(1, np.float32))


def test_only_what_lies_in_a_forward_of_the_target_is_hidden():
    worker = [
        target(0, 100),
        waited(110, 140),
        waited(140, 150, patience=0.0),
        target(200, 300),
        target(400, 500),
    ]
    draft = [drafted(50, 120), drafted(120, 130), prefilled(210, 220), drafted(390, 410)]
    first, second = shares(worker, draft)
    assert (first.busy, first.hidden, first.waited) == (80, 50, 30)
    assert (second.busy, second.hidden, second.waited) == (20, 10, 0)


def test_a_prefill_of_the_target_hides_too_and_begins_no_step():
    (only,) = shares([target(0, 10), target(20, 60, "EXTEND"), target(80, 90)], [drafted(50, 70)])
    assert (only.busy, only.hidden) == (20, 10)


def test_messages_are_followed_from_one_process_to_the_other():
    frames = [events.framed([Closed(session)]) for session in "aba"]
    worker = [events.Posted(at, frame) for at, frame in zip((1, 2, 3), frames, strict=True)]
    draft = [events.Heard(9, events.framed([Closed("a"), Closed("b"), Closed("a")]), NOTHING)]
    assert messages(worker, draft) == [(1, 9), (2, 9), (3, 9)]
    said = [drafted(0, 4, [growth(0)]), drafted(4, 6, [growth(1)])]
    collected = [waited(5, 7, answers=[growth(0), growth(1)])]
    assert answers(collected, said) == [(4, 7), (6, 7)]


def test_an_early_exit_speaks_at_a_share_of_its_verification():
    one = np.ones(1)
    said = events.framed(
        [Expected("s", 1, 0, one.astype(np.int64), one.astype(np.int32), one.astype(np.float32))]
    )
    worker = [
        events.Posted(5, said),  # beside no verification
        events.Posted(60, said),
        events.Posted(70, events.framed([Closed("s")])),
        target(10, 110),
        target(200, 240, "EXTEND"),
        events.Posted(320, said),
        target(300, 400),
    ]
    draft = [events.Heard(at, said, NOTHING) for at in (6, 65)]
    draft += [
        events.Heard(71, events.framed([Closed("s")]), NOTHING),
        events.Heard(410, said, NOTHING),
    ]
    assert spoken(worker, draft) == [Spoken(10, 0.5, 0.55), Spoken(300, 0.2, 1.1)]


@pytest.fixture
def record():
    worker = [events.Step(0, 120), target(10, 100), waited(130, 150), target(200, 300)]
    rows = timeline(worker, [drafted(20, 90)], [LookedUp(5, ["hit"]), LookedUp(190, ["miss"])], (0, 260))
    row = {
        "variant": "v", "hidden": {"value": 0.5, "low": 0.4, "high": 0.6}, "hidden_by_step": [0.1, 0.5, 0.9],
        "waiting": 0.1, "step_ms": 1.0, "target_ms": 1.0, "draft_ms": 1.0, "steps": 2, "tokens": 4, "seconds": 2.0,
        "counted": {"specstore_speculation_lookups{hit}": 3.0, "specstore_draft_guesses{0}": 1.0,
                    "specstore_draft_guesses{1}": 3.0, "specstore_verified_nodes{draft_model}": 8.0,
                    "specstore_early_exit_tokens{first}": 1.0, "specstore_early_exit_tokens{none}": 3.0},
        "exit": {"layer": 15, "layers": 30, "verifications": 7, "posted": [0.49, 0.5, 0.52], "heard": [0.5, 0.51, 1.03]},
    }  # fmt: skip
    control = row | {"variant": drafting.SERIAL}
    return {
        "manifest": {"command": "draft_trace", "settings": {"emulated_ms": 100.0}},
        "results": [row, control],
        "timelines": [{"variant": "v", "timeline": rows}],
    }


def test_a_timeline_holds_what_happened_in_its_window(record):
    rows = record["timelines"][0]["timeline"]
    assert {row["kind"] for row in rows} == {"worker", "target", "wait", "draft", "lookup"}
    assert next(row for row in rows if row["kind"] == "draft") == {
        "kind": "draft", "from": 20e-6, "to": 90e-6, "label": "1",
    }  # fmt: skip
    own = [(row["from"], row["to"]) for row in rows if row["kind"] == "worker"]
    assert own == [(0, 10e-6), (100e-6, 120e-6)], "the worker's step without the forward in it"


def test_the_record_has_a_table_and_a_picture(record, tmp_path):
    plots.draw("draft-trace", record, tmp_path)
    assert (tmp_path / "draft-trace.png").stat().st_size > 1000
    text = "\n".join(drafting.tables(record))
    assert "EMULATED" in text and "0.50 [0.40, 0.60]" in text and "3 / 0 / 0" in text
    assert "0: 0.25, 1: 0.75; tokens accepted: draft_model 0 of 8" in text
    expected = "| 15 of 30 | 0.500 | 0.500 [0.490, 0.520] | 0.510 [0.500, 1.030] | 7 | 1 | 0.25, 0.00, 0.75 |"
    assert text.count("15 of 30") == text.count(expected) == 1, "what the control's exit says is held back"
