"""`python -m benchmarks.agent`: its tasks, what the agent says, and how the ways are compared."""

from __future__ import annotations

import pytest

from benchmarks import agent
from benchmarks.agent import ALGORITHMS, NAMED, PLAIN, UNNAMED, Agent, Task, parse, played, summarised, tasks
from benchmarks.report.page import tables_of
from benchmarks.serve.measure import Answer

TASKS = [Task(f"f{place}", f"def f{place}(): pass") for place in range(4)]


def file_with(name, lines):
    return "import os\n\n" + f"def {name}():\n" + "    os.sync()\n" * lines


def test_tasks_are_functions_of_some_length_no_name_twice():
    files = [
        file_with("short", 3),
        file_with("f", 15),
        file_with("f", 16),
        file_with("test_it", 15),
        file_with("g", 20),
    ]
    first, second = tasks(2, files)
    assert (first.name, first.source) == ("f", file_with("f", 15).removeprefix("import os\n\n").rstrip())
    assert second.name == "g"
    with pytest.raises(ValueError, match="have 2, 3 are wanted"):
        tasks(3, files)


class Words:
    """A tokenizer whose tokens are characters."""

    def apply_chat_template(self, said, **_):
        return [ord(letter) for turn in said for letter in f"{turn['role']}: {turn['content']}\n"]

    def decode(self, tokens, **_):
        return "".join(map(chr, tokens))


@pytest.mark.parametrize("way", [UNNAMED, NAMED])
def test_a_turn_says_all_that_was_said(way, monkeypatch):
    asked = []

    def answer(server, prompt, sampling):
        asked.append((Words().decode(prompt), sampling.get("custom_params")))
        return Answer([ord("A"), ord("B")] * 8, [0.0, 1.0, 3.0], [0, 8, 16], 5)

    monkeypatch.setattr(agent, "answer", answer)
    row = Agent(None, way, Words(), 16).work(TASKS[0], 7, 2)
    (first, hints), (second, later) = asked
    assert second.startswith(f"{first}assistant: {'AB' * 8}\nuser: The tests say:")
    wanted = {"specstore": {"conversation": "task 7", "reference": TASKS[0].source}} if way == NAMED else None
    assert hints == later == wanted
    answers = row.pop("answers")
    assert answers == [[65, 66] * 8] * 2
    assert row == {"tokens": 30, "steps": 10, "timed": 16, "seconds": 4, "all_tokens": 32, "all_seconds": 6}


def worked(way, task, place):
    fast = way != PLAIN
    answers = [[place]] if way != UNNAMED or place else [[-1]]
    return {
        "tokens": 40, "steps": 10 if fast else 40, "timed": 32, "seconds": 2.0 if fast else 4.0, "all_tokens": 40,
        "all_seconds": 4.0 if fast else 5.0, "answers": answers,
    }  # fmt: skip


def test_ways_take_turns_and_are_compared_with_plain():
    ways = list(ALGORITHMS)
    rows = list(played(TASKS, ways, worked))
    assert [row["way"] for row in rows[:: len(ways)]] == ways, "each task begins with another"
    found = {row["way"]: row for row in summarised(rows, ways)}
    assert found[NAMED]["tokens_per_step"].value == 4 and found[PLAIN]["tokens_per_step"].value == 1
    assert (found[NAMED]["decoding"].value, found[NAMED]["answers"].value) == (2, 1.25)
    assert (found[NAMED]["same"], found[UNNAMED]["same"]) == (1, 0.75)


def test_its_table():
    settings = vars(parse(["--dtype", "float32"]))
    ratio = {"value": 4.0, "low": 3.5, "high": 4.5}
    results = [{"way": NAMED, "tokens_per_step": ratio, "decoding": ratio, "answers": ratio, "same": 0.95}]
    lines = tables_of({"manifest": {"command": "agent", "settings": settings}, "results": results})
    cell = "4.00 [3.50, 4.50]"
    assert f"| {NAMED} | {cell} | {cell} | {cell} | 95% |" in lines
