"""The shipped prior's text: one answer a prompt, small, and no benchmark prompt in it."""

import json

from benchmarks.prompts import SHIPPED, load_prompts
from sglang_patches.demo.corpus import CORPUS, PROMPTS


def test_one_answer_a_prompt():
    answers = [json.loads(line)["text"] for line in CORPUS.read_text().splitlines()]
    assert len(answers) == len(PROMPTS.read_text().splitlines())
    assert all(answers)
    assert CORPUS.stat().st_size < 200_000


def test_no_benchmark_prompt_is_answered_in_it():
    benchmark = "\n".join(prompt.text for prompt in load_prompts(SHIPPED))
    assert [prompt for prompt in PROMPTS.read_text().splitlines() if prompt in benchmark] == []
