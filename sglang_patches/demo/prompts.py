"""Prompts as benchmarks and tests ask them: lines of a JSONL file, each a chat of one turn."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Prompt:
    category: str
    text: str


def load_prompts(path: Path) -> list[Prompt]:
    """One prompt a line. The text is the field `prompt`, `question` or the first of `turns`; the category is the field
    `category`, else the file's name. Raises ValueError naming the line that has none of them."""
    with path.open() as file:
        return [_parse(json.loads(line), path, number) for number, line in enumerate(file, 1)]


def _parse(row: dict, path: Path, number: int) -> Prompt:
    text = row.get("prompt") or row.get("question") or next(iter(row.get("turns", ())), None)
    if not text:
        raise ValueError(f"{path}:{number}: none of the fields prompt, question, turns")
    return Prompt(row.get("category", path.stem), text)


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts taken in turn from each category, in file order within a category."""
    queues: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        queues.setdefault(prompt.category, []).append(prompt)
    rounds = itertools.zip_longest(*queues.values())
    return [prompt for prompt in itertools.chain.from_iterable(rounds) if prompt is not None][:count]


def chat_ids(tokenizer, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of each prompt as a one-turn chat."""
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], add_generation_prompt=True, return_dict=False
        )
        for prompt in prompts
    ]
