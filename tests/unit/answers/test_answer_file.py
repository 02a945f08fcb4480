"""The file of answers: what is counted, what is cut off, what is refused."""

import json

import pytest

from datastore_service.answers.answer_file import AnswerFile
from datastore_service.storage.errors import StorageError


def row(prompt: str, round: int = 1, tokens: list[int] | None = None) -> dict:
    line = {"prompt": prompt, "round": round, "answer": f"to {prompt}"}
    return line if tokens is None else line | {"tokens": tokens}


def line(*arguments) -> str:
    return json.dumps(row(*arguments)) + "\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "answers.jsonl"


def test_what_is_appended_is_found_again(path):
    with AnswerFile(path) as file:
        file.append(row("a", 1, [3, 4]))
        file.append(row("ü", 2))
        assert (len(file), file.tokens, file.without_tokens) == (2, 2, 1)
    with AnswerFile(path) as file:
        assert file.answered == {("a", 1): 1, ("ü", 2): 1}
        assert (len(file), file.tokens, file.without_tokens) == (2, 2, 1)


def test_an_answer_is_in_the_file_as_soon_as_it_is_appended(path):
    with AnswerFile(path) as file:
        file.append(row("a"))
        assert path.read_text() == line("a")


@pytest.mark.parametrize("length", [1, 12, len(line("b")) - 1])
def test_an_unfinished_last_line_is_cut_off(path, length):
    path.write_text(line("a") + line("b")[:length])
    with AnswerFile(path) as file:
        assert len(file) == 1
        file.append(row("c"))
    assert path.read_text() == line("a") + line("c")


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("some text", "line 1"),
        ("some text\n", "line 1"),
        ('{"prompt": "a"}', "line 1"),
        ('{"prompt": "a"}\n', "line 1"),
        ('{"prompt": 5, "answer": "b"}\n', "line 1"),
        ('{"prompt": "a", "answer": "b", "round": "x"}\n', "line 1"),
        (line("a") + "\n", "line 2"),
        (line("a") + "[1]\n", "line 2"),
        (line("a") + "not ours", "line 2"),
    ],
)
def test_a_file_of_another_kind_is_refused_and_stays_as_it_is(path, content, place):
    path.write_text(content)
    with pytest.raises(StorageError, match=f"{place}: no answer: not a JSON object"):
        AnswerFile(path)
    assert path.read_text() == content


def test_first_rounds_come_first(path):
    with AnswerFile(path) as file:
        assert file.missing(["a", "b"], 2) == [(0, 1), (1, 1), (0, 2), (1, 2)]
        file.append(row("b"))
        file.append(row("a", 2))
        assert file.missing(["a", "b"], 2) == [(0, 1), (1, 2)]
        assert file.missing(["a", "b"], 1) == [(0, 1)]
        assert file.missing(["a", "new", "b"], 1) == [(0, 1), (1, 1)]


def test_a_prompt_that_occurs_twice_is_answered_twice(path):
    with AnswerFile(path) as file:
        file.append(row("a"))
        assert file.missing(["a", "a"], 1) == [(1, 1)]


def test_a_line_without_its_round_is_of_the_first(path):
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    with AnswerFile(path) as file:
        assert file.missing(["a"], 2) == [(0, 2)]


def test_answers_to_other_prompts_are_refused(path):
    path.write_text(line("a") + line("what else is there to be asked of a model, one might ask"))
    with (
        AnswerFile(path) as file,
        pytest.raises(
            StorageError, match=r"holds answers to other prompts: 'what else is there to be asked of a mode'$"
        ),
    ):
        file.missing(["a"], 1)


def test_one_run_at_a_time_has_the_file(path):
    with AnswerFile(path), pytest.raises(StorageError, match="lock: another run writes to this file"):
        AnswerFile(path)
    AnswerFile(path).__exit__(None, None, None)
