"""Prompts of benchmarks and tests, the small set that is shipped, and the names of categories.

A file of prompts has a chat of one turn in each line of JSON.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SHIPPED = Path(__file__).parent / "data" / "prompts.jsonl"
WORKSHOP = Path(__file__).resolve().parents[2] / "shared" / "data"
ALL = "all"  # in reports: the categories together
MT_BENCH = frozenset(
    ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
)
SPEC_BENCH = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


def spec_bench_category(category: str) -> str:
    """Spec-Bench's six tasks: the eight MT-bench categories are one of them."""
    return "mt_bench" if category in MT_BENCH else category


def digest(path: Path) -> str:
    """sha256 of a prompt file, for a run's manifest."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


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
