"""The comparison of all methods under several loads, without servers: what is asked, what is counted, what a table says."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from benchmarks.beside import tables as beside
from benchmarks.beside.loads import LOADS, LONG_TOKENS, known_answers, long, parse, requests_of
from benchmarks.beside.summary import summarise_loads
from benchmarks.report.records import Journal, dumps
from benchmarks.serve.cases import Pool
from benchmarks.traces import SHIPPED, recorded_rows
from tests.support.tiny_model import write_spelling_model

WORDS = ["--model", "m", "--draft", "d"]


@pytest.fixture
def pool(tmp_path) -> Pool:
    folder = write_spelling_model(tmp_path)
    return Pool(recorded_rows(SHIPPED), PreTrainedTokenizerFast.from_pretrained(folder))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--variants", "sssd"], "compared with plain"),
        (["--variants", "plain", "sssd"], "of whose draft forwards"),
        (["--variants", "plain", "mirror"], "--early-exit"),
        (["--batch", "17"], "do not fill a batch of 17"),
        (["--speed", "0"], "not above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        parse(WORDS + words)
    assert message in capsys.readouterr().err


def test_every_load_has_its_prompts(pool):
    given = SimpleNamespace(loads=list(LOADS), count=16)
    found = requests_of(given, pool)
    assert list(found) == list(LOADS) and all(len(requests) == 16 for requests in found.values())
    prompts = [tuple(request.prompt) for load in ("mixed", "repeated") for request in found[load]]
    assert len(set(prompts)) == 32


def test_too_few_prompts_are_an_error(pool):
    with pytest.raises(ValueError, match="for repeated, 40 are needed"):
        requests_of(SimpleNamespace(loads=["mixed", "repeated"], count=40), pool)


def test_long_prompts_begin_with_other_texts(pool):
    pool.chat = lambda text: text.split("\n\n")
    found = long(pool, 4)
    assert len({request.prompt[0] for request in found}) == 4
    sizes = {row["prompt"]: len(row["prompt_tokens"]) for row in pool.rows}
    for request in found:
        assert LONG_TOKENS / 2 < sum(sizes.get(text, 0) for text in request.prompt) <= LONG_TOKENS


def test_known_answers_are_those_that_were_recorded(pool, tmp_path):
    requests = pool.take(3)
    rows = recorded_rows(known_answers(requests, tmp_path))
    assert [row["tokens"] for row in rows] == [request.output.tolist() for request in requests]


def journal(path: Path, cells: dict[tuple[str, int], dict[str, float]]) -> Path:
    """cells: by load and group the tokens a second of each variant."""
    writing = Journal(path, {})
    for (load, group), speeds in cells.items():
        for variant, speed in speeds.items():
            labels = {"load": load, "speed": 3.0, "batch": 1, "group": group, "variant": variant}
            writing.add("group", labels | {"tokens": 10 * speed, "seconds": 10.0, "steps": 10})
    writing.add("left_out", {"load": "mixed", "speed": 3.0, "batch": 1, "group": 9, "variant": "adaptive"})
    for prompt, seconds in enumerate(({"plain": 1.0, "adaptive": 1.5}, {"plain": 2.0, "adaptive": 3.0})):
        for variant, value in seconds.items():
            writing.add("first", {"load": "mixed", "prompt": prompt, "variant": variant, "seconds": value})
    return path


def test_the_planner_is_compared_with_the_fastest_of_each_load(tmp_path):
    cells = {
        ("mixed", 0): {"plain": 1, "sssd": 2, "duo": 4, "adaptive": 6},
        ("mixed", 1): {"plain": 1, "sssd": 2, "duo": 4, "adaptive": 6},
        ("long", 0): {"plain": 1, "sssd": 8, "duo": 4, "adaptive": 4},
        ("long", 1): {"plain": 1, "sssd": 8},  # cut off
    }
    found = summarise_loads(journal(tmp_path / "journal", cells))
    planner = {row["load"]: (row["best"], round(row["over_best"].value, 3)) for row in found["planner"]}
    assert planner == {"mixed": ("duo", 1.5), "long": ("sssd", 0.5), "all": (None, round(16 / 16, 3))}
    groups = {(row["load"], row["variant"]): row["groups"] for row in found["rows"]}
    assert groups["mixed", "duo"] == 2 and groups["long", "sssd"] == 1
    first = {row["variant"]: row["over_plain"].value for row in found["first_tokens"]}
    assert first == pytest.approx({"plain": 1.0, "adaptive": 1.5})


def test_the_fastest_is_not_chosen_by_the_group_that_it_is_compared_in(tmp_path):
    """Two that are equally fast take turns: the planner, which is as fast, is not behind."""
    speeds = [{"plain": 1, "duo": 2 + at % 2, "double": 3 - at % 2, "adaptive": 2.5} for at in range(4)]
    cells = {("mixed", at): of for at, of in enumerate(speeds)}
    row, _ = summarise_loads(journal(tmp_path / "journal", cells))["planner"]
    assert row["over_best"].value == pytest.approx(10 / 8)  # by the same groups: 10 / 10


def test_what_each_request_had_of_the_draft_model_is_summed_over_the_rounds(tmp_path):
    writing = Journal(tmp_path / "journal", {})
    for accepted in ([3, 0, 1], [2, 0, 4]):
        writing.add("sessions", {"speed": 3.0, "batch": 3, "variant": "duo", "accepted": accepted})
    record = summarise_loads(tmp_path / "journal")
    (row,) = record["sessions"]
    assert row == {"speed": 3.0, "batch": 3, "variant": "duo", "rounds": 2, "accepted": [5, 0, 5]}
    assert "| 3 | 3 | DUO | 2 | 1 | 0 | 5 | 5 |" in "\n".join(beside.sessions(record["sessions"]))


def test_without_the_planner_there_is_no_comparison_with_it(tmp_path):
    path = journal(tmp_path / "journal", {("mixed", 0): {"plain": 1, "saguaro": 2}})
    assert summarise_loads(path)["planner"] == []


def test_the_table_names_the_best_other(tmp_path):
    cells = {("mixed", group): {"plain": 1, "duo": 4, "adaptive": 6} for group in (0, 1)}
    settings = {"rows": 24, "model": "m", "dtype": "bfloat16", "draft": "d", "nodes": 8}
    found = summarise_loads(journal(tmp_path / "journal", cells)) | {"manifest": {"settings": settings}}
    lines = beside.loads(json.loads(dumps(found)))
    assert "had begun all: 1. Last" in lines[2]
    assert "| 3 | 1 | mixed | 2 | 1000 | 4.00 | 6.00 | 1.50 [1.50, 1.50] (DUO) |" in lines
