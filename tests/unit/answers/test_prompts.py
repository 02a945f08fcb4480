"""Which documents of a file are prompts."""

import json

import numpy as np
import pytest

from datastore_service.answers.prompts import Prompt, read_prompts
from datastore_service.storage.errors import StorageError


def test_a_prompt_is_a_document(tmp_path):
    lines, text = tmp_path / "lines.jsonl", tmp_path / "text.txt"
    lines.write_text('{"q": "one"}\n{"q": "two"}\n')
    text.write_text("three\nlines\nof it")
    assert read_prompts([lines, text], "q") == [
        Prompt("one", f"{lines}: document 1"),
        Prompt("two", f"{lines}: document 2"),
        Prompt("three\nlines\nof it", f"{text}: document 1"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"prompt": " \n"}, "document 2: empty prompt"),
        ({"prompt": [1, 2]}, "document 2: is token ids, and a prompt is text"),
        ({"prompt": 5}, "line 2: neither a string"),
        ({"text": "x"}, "line 2: no JSON object with a field 'prompt'"),
        ({"prompt": "\ud800"}, "line 2: not text: lone surrogate"),
    ],
)
def test_what_is_no_prompt_is_named(tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n' + json.dumps(content))
    with pytest.raises(StorageError, match=f"{path}: {message}"):
        read_prompts([path], "prompt")


def test_files_without_prompts(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    np.save(tmp_path / "ids.npy", np.arange(3))
    with pytest.raises(ValueError, match="prompts: none in .*empty.jsonl"):
        read_prompts([tmp_path / "empty.jsonl"], "prompt")
    with pytest.raises(StorageError, match="is token ids"):
        read_prompts([tmp_path / "ids.npy"], "prompt")
    with pytest.raises(StorageError, match="No such file"):
        read_prompts([tmp_path / "none"], "prompt")
