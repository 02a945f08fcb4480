"""A trace of a worker's part and a draft side says how often what happened, and a replay that differs from it is noticed."""

import dataclasses
import functools
import sys

import msgspec
import pytest

from benchmarks.draft_trace import SERIAL_VARIABLE, VARIABLE, events, recorder
from benchmarks.draft_trace.draft_recorder import RecordedSide, ToldLate
from benchmarks.draft_trace.replay import MismatchError, counted_here, replayed, since
from sglang_patches.drafting.draft_side import DraftParts, Learner
from sglang_patches.drafting.messages import Closed, Committed, Opened, Verifying
from sglang_patches.drafting.process.settings import DraftSettings
from sglang_patches.drafting.rollouts import Rollouts
from sglang_patches.drafting.saguaro import GeometricFanOut
from tests.support.agreeing_model import VOCABULARY, model
from tests.support.draft_side import FunctionModel, InProcessDraftSide
from tests.unit.drafting import test_speculation

ROWS, LOOKAHEAD = 8, 4
WORDS = {"str": "x", "int": 1, "bool": False, "dict[str, object]": {}}


@pytest.fixture
def recording(tmp_path, monkeypatch):
    """Both sides in this process, recorded."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    fields = {field.name: WORDS[str(field.type)] for field in dataclasses.fields(DraftSettings)}
    settings = DraftSettings(**fields | {"method": "SAGUARO", "rows": ROWS, "lookahead": LOOKAHEAD})
    monkeypatch.setattr(sys, "argv", ["draft", *settings.flags()])
    worker_side = functools.partial(recorder.RecordedSpeculation, vocabulary=VOCABULARY)
    monkeypatch.setattr(test_speculation, "Speculation", worker_side)
    recorder._trace.cache_clear()
    return tmp_path


def served(steps=30):
    """Returns what was counted meanwhile."""
    before = counted_here()
    side = InProcessDraftSide(model(0.7), rounds=3)
    parts = DraftParts(lambda: Learner(GeometricFanOut(), Rollouts(LOOKAHEAD)))
    side._side = RecordedSide(FunctionModel(model(0.7)), parts, ROWS, ROWS)
    run = test_speculation.Run(side)
    for _ in range(steps):
        run.commit(run.step())
    run.speculation.close([run.book.close("r0")])
    return since(before)


def test_a_replay_counts_what_was_counted(recording):
    counted = served()
    assert {key.split("{")[0] for key in counted} >= {
        "specstore_speculation_lookups",
        "specstore_draft_guesses",
    }
    again = replayed(recording)
    assert {key: again[key] for key in counted} == counted


@pytest.mark.parametrize("process", ["worker", "draft"])
def test_a_trace_that_lacks_an_event_is_not_replayed(recording, process):
    served(steps=6)
    (path,) = recording.glob(f"{process}-*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    lacking = next(at for at, line in enumerate(lines) if b'"Collected"' in line or b'"Heard"' in line)
    path.write_bytes(b"".join(lines[:lacking] + lines[lacking + 1 :]))
    with pytest.raises(MismatchError):
        replayed(recording)


def test_a_line_that_was_cut_off_is_left_out_and_no_other(recording):
    served(steps=2)
    (path,) = recording.glob("draft-*.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert len(events.read(path)) == whole.count(b"\n") - 1
    path.write_bytes(whole.replace(b"\n", b"x\n", 1))
    with pytest.raises(msgspec.DecodeError):
        events.read(path)


def test_told_late_a_draft_side_hears_of_a_verification_with_its_outcome():
    late = ToldLate()
    opened, verifying, other = (
        Opened("a", [], 1),
        Verifying("a", 1, [], [], []),
        Verifying("b", 1, [], [], []),
    )
    assert late.pass_on([opened, verifying, other]) == []
    outcome = Committed("a", 0, [], 1)
    assert late.pass_on([outcome]) == [opened, verifying, outcome]
    end = Closed("b")
    assert late.pass_on([end]) == [other, end]


def test_a_draft_side_that_is_told_late_is_replayed_too(recording, monkeypatch):
    monkeypatch.setenv(SERIAL_VARIABLE, "1")
    counted = served()
    again = replayed(recording)
    assert {key: again[key] for key in counted} == counted
