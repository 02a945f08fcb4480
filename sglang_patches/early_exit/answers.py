"""The texts that early exits are trained on: a model's own answers, as `specstore distil` collects them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Text(NamedTuple):
    """Token ids."""

    prompt: list[int]
    answer: list[int]


def read_answers(files: Sequence[Path], tokenizer) -> list[Text]:
    """One a line: an object with the strings `prompt` and `answer`, and the answer's token ids `tokens` where they are known. A prompt
    is one turn of a chat. tokenizer: of transformers. Raises ValueError that names file and line."""
    texts = [text for file in files for text in _of_file(file, tokenizer)]
    if not texts:
        raise ValueError(f"no answers in {', '.join(map(str, files))}")
    return texts


def _of_file(file: Path, tokenizer) -> Iterator[Text]:
    with file.open() as lines:
        for number, line in enumerate(lines, start=1):
            match _parsed(line):
                case {"prompt": str(prompt), "answer": str(answer)} as row:
                    ids = row.get("tokens")
                    if ids is None:
                        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
                    yield Text(as_chat(prompt, tokenizer), ids)
                case _:
                    raise ValueError(f"{file}: line {number}: no JSON object with `prompt` and `answer`")


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def as_chat(prompt: str, tokenizer) -> list[int]:
    """Token ids, as a server gives them to the model."""
    turns = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
