"""Prompts are read from files of every kind and spread over their categories."""

import json

import pytest

from benchmarks.prompts import Prompt, load_prompts, spread


def test_prompt_files_of_every_kind(tmp_path):
    file = tmp_path / "some.jsonl"
    rows = [{"question": "q"}, {"turns": ["first", "second"], "category": "qa"}, {"prompt": "p"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_prompts(file) == [Prompt("some", "q"), Prompt("qa", "first"), Prompt("some", "p")]
    file.write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match=r"some.jsonl:1: none of the fields"):
        load_prompts(file)


def test_spread_takes_categories_in_turn():
    prompts = [Prompt(c, t) for c, t in (("a", "1"), ("a", "2"), ("b", "3"), ("b", "4"))]
    assert [p.text for p in spread(prompts, 3)] == ["1", "3", "2"]
