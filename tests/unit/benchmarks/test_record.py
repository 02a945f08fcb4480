"""Recording: which prompts are asked, and what an interrupted run goes on with. The server is a list of canned answers."""

import itertools

import pytest

from benchmarks import record
from benchmarks.prompts import Prompt
from benchmarks.traces import load_traces
from datastore_service.answers.answer_file import AnswerFile
from datastore_service.storage.errors import StorageError


class Tokenizer:
    """One token a letter; a template with a system turn."""

    def apply_chat_template(self, messages, **options):
        return "".join(f"<{message['role']}>{message['content']}</>" for message in [SYSTEM, *messages])

    def encode(self, text, add_special_tokens):
        return list(map(ord, text))


class Letters(Tokenizer):
    """The ids of a chat are one number: how many letters its prompt has."""

    def apply_chat_template(self, messages, **options):
        return [len(messages[0]["content"])]


SYSTEM = {"role": "system", "content": "be kind"}


class Questions:
    """Answers every round with the same questions."""

    def __init__(self, *questions: tuple[str, str]) -> None:
        self.questions = questions
        self.asked = []

    def generate_many(self, prompts, concurrency, **sampling):
        self.asked.append((prompts, sampling))
        return [
            {
                "text": text,
                "output_ids": list(map(ord, text)),
                "meta_info": {"finish_reason": {"type": reason}},
            }
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


def test_an_interrupted_recording_goes_on_with_what_is_missing(tmp_path):
    out, prompts = tmp_path / "answers.jsonl", [Prompt("a", "one"), Prompt("b", "two"), Prompt("c", "three")]
    with AnswerFile(out) as file:
        record.record(Questions(("so", "stop")), Letters(), prompts[:1], 1, 8, file)
    with out.open("a") as half:
        half.write('{"category": "b", "prompt": "tw')
    with AnswerFile(out) as file:
        assert record.unanswered(prompts, file) == prompts[1:]
    (trace,) = load_traces(out)
    assert (trace.category, trace.prompt.tolist(), trace.output.tolist()) == ("a", [3], list(map(ord, "so")))


def test_a_file_of_other_answers_is_refused(tmp_path):
    out = tmp_path / "answers.jsonl"
    out.write_text('{"prompt": "other", "answer": "so"}\n')
    with AnswerFile(out) as file, pytest.raises(StorageError, match="holds answers to other prompts"):
        record.unanswered([Prompt("a", "one")], file)
