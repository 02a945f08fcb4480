"""Recording: which prompts are asked, and what an interrupted run goes on with. The server is a list of canned answers."""

import itertools
import json

import pytest

from benchmarks import record
from sglang_patches.demo.prompts import Prompt


class Tokenizer:
    """One token a letter; a template with a system turn."""

    def apply_chat_template(self, messages, **options):
        return "".join(f"<{message['role']}>{message['content']}</>" for message in [SYSTEM, *messages])

    def encode(self, text, add_special_tokens):
        return list(map(ord, text))


SYSTEM = {"role": "system", "content": "be kind"}


class Questions:
    """Answers every round with the same questions."""

    def __init__(self, *questions: tuple[str, str]) -> None:
        self.questions = questions
        self.asked = []

    def generate_many(self, prompts, concurrency, **sampling):
        self.asked.append((prompts, sampling))
        return [
            {"text": text, "output_ids": list(text), "meta_info": {"finish_reason": {"type": reason}}}
            for text, reason in self.questions
        ]


def test_a_question_begins_where_the_users_text_would():
    assert "".join(map(chr, record.question_start(Tokenizer()))) == "<system>be kind</><user>"


def test_own_prompts_are_complete_new_and_not_trivial():
    server = Questions(
        ("What is bread?", "stop"), ("What is", "length"), (" What is bread? ", "stop"), ("Hm", "stop"),
        ("Why is it?", "stop"), ("Known already?", "stop"),
    )  # fmt: skip
    found = itertools.islice(record.own_prompts(server, Tokenizer(), 6, ["Known already?"]), 2)
    assert list(found) == [Prompt("own", "What is bread?"), Prompt("own", "Why is it?")]
    prompts, sampling = server.asked[0]
    assert len(prompts) == 6 and sampling["temperature"] == 1.0


def test_an_interrupted_file_goes_on_after_its_last_complete_line(tmp_path):
    out = tmp_path / "answers.jsonl"
    out.write_text(json.dumps({"prompt": "one"}) + "\n" + '{"prompt": "tw')
    assert record.answered(out) == ["one"]
    assert out.read_text() == json.dumps({"prompt": "one"}) + "\n"
    prompts = [Prompt("a", "one"), Prompt("a", "two")]
    assert record.unanswered(prompts, ["one"], out) == prompts[1:]
    assert record.answered(tmp_path / "new.jsonl") == []


def test_a_file_of_other_answers_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="holds answers to other prompts"):
        record.unanswered([Prompt("a", "one")], ["other"], tmp_path / "answers.jsonl")
