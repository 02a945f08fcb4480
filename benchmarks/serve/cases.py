"""What is asked. Cases:

mixed       all categories in one batch
tasks       one category of prompts per group: code and other languages are among them
repeated    as mixed, and every server has answered each prompt once before it is timed
halves      as repeated, but every second prompt is new
sampled     as mixed, at temperature 0.7
followup    the recorded answer stands in the prompt, and a second question is about it
long        texts of several prompts in one, LONG tokens, to be summarized
unrelated   random words in, sampled at temperature 1: nothing recurs, no draft can help
streamed    as mixed, every token sent as it comes: the case for times between tokens

Servers learn from what they answer, so mixed, tasks, repeated, halves, sampled and streamed never ask one prompt twice, in whatever case and batch size. A group
is one steady load (benchmarks.serve.measure).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from benchmarks.prompts import spec_bench_category

LONG = 1500  # tokens
FEWEST_GROUPS = 3  # of a case and batch size: the interval of two reaches from nothing to everything
WORDS = 60  # random tokens of an unrelated prompt
PILOT_PROMPTS = 6  # at least, of the first load before a run
PILOT_GROUPS = 2  # of each load, at least
PILOT_WORDS = 600  # tokens of a prompt of the second
FOLLOW_UPS = (
    "Say the same in half the words.",
    "Now turn your answer into a list of points.",
    "Which part of your answer is the most important one, and why?",
)
SUMMARIZE = "Summarize all of the above in one paragraph."


@dataclass(frozen=True)
class Request:
    """output: the greedy answer, if it is recorded."""

    category: str
    prompt: Sequence[int]
    output: np.ndarray | None = None


@dataclass(frozen=True)
class Case:
    """groups: of each batch size. sampling: parameters of the requests. seen: of a group, every so many prompts one is answered once
    untimed; 0 for none. chunk:
    tokens that a server sends together. One is what users get, but it costs a tenth of plain decoding's throughput at batch
    8 on two cores and less where steps yield more, which would flatter speculation."""

    name: str
    groups: dict[int, list[list[Request]]]
    sampling: dict[str, object] = field(default_factory=lambda: {"temperature": 0.0})
    seen: int = 0
    chunk: int = 8

    @property
    def replayable(self) -> bool:
        """Whether recorded answers and the times of other loads say what to expect."""
        return not self.seen and self.sampling["temperature"] == 0 and self.chunk == Case.chunk


class Pool:
    """Recorded rows (benchmarks.traces.recorded_rows) in a random order that is the same every time."""

    def __init__(self, rows: Sequence[dict], tokenizer, seed: int = 0) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self.rows = list(rows)
        random.Random(seed).shuffle(self.rows)
        self._unused = list(self.rows)

    def categories(self) -> list[str]:
        return sorted({spec_bench_category(row["category"]) for row in self.rows})

    def take(self, count: int, category: str | None = None) -> list[Request]:
        """Unused ones, and fewer than `count` where there are no more."""
        suits = (row for row in self._unused if category in (None, spec_bench_category(row["category"])))
        wanted = list(itertools.islice(suits, count))
        taken = set(map(id, wanted))
        self._unused = [row for row in self._unused if id(row) not in taken]
        kinds = (spec_bench_category(row["category"]) for row in wanted)
        outputs = (np.array(row["tokens"], np.int32) for row in wanted)
        return [
            Request(*of) for of in zip(kinds, (row["prompt_tokens"] for row in wanted), outputs, strict=True)
        ]

    def chat(self, *turns: str) -> list[int]:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def prompts_for(batch: int) -> int:
    """Prompts of one steady load: each place but the last is taken a second time."""
    return 2 * batch - 1


Source = Callable[[int], list[Request]]  # the next ones, as many as asked for or all that are left


def deal(
    source: Source, batches: Sequence[int], prompts: int, fewest: int = FEWEST_GROUPS
) -> dict[int, list[list[Request]]]:
    """About `prompts` of them for each batch size, at least `fewest` groups; a group that cannot be filled is left out."""
    dealt: dict[int, list[list[Request]]] = {}
    for batch in batches:
        size = prompts_for(batch)
        groups = [source(size) for _ in range(max(fewest, prompts // size))]
        dealt[batch] = [group for group in groups if len(group) == size]
    return dealt


def from_list(requests: Sequence[Request]) -> Source:
    rest = iter(requests)
    return lambda count: [request for request, _ in zip(rest, range(count), strict=False)]


def tasks(pool: Pool, batches: Sequence[int], prompts: int) -> Case:
    groups: dict[int, list[list[Request]]] = {batch: [] for batch in batches}
    for category in pool.categories():
        for batch, dealt in deal(partial(pool.take, category=category), batches, prompts).items():
            groups[batch] += dealt
    return Case("tasks", groups)


def pooled(name: str, pool: Pool, batches: Sequence[int], prompts: int, **how: object) -> Case:
    """All categories in one batch."""
    return Case(name, deal(pool.take, batches, prompts), **how)


def followup(pool: Pool, batches: Sequence[int], prompts: int) -> Case:
    requests = [
        Request("followup", pool.chat(row["prompt"], row["answer"], FOLLOW_UPS[i % len(FOLLOW_UPS)]))
        for i, row in enumerate(pool.rows)
    ]
    return Case("followup", deal(from_list(requests), batches, prompts))


def long(pool: Pool, batches: Sequence[int], prompts: int) -> Case:
    requests, texts, size = [], [], 0
    for row in pool.rows:
        texts.append(row["prompt"])
        size += len(row["prompt_tokens"])
        if size >= LONG:
            requests.append(Request("long", pool.chat("\n\n".join([*texts, SUMMARIZE]))))
            texts, size = [], 0
    return Case("long", deal(from_list(requests), batches, prompts))


def random_words(pool: Pool, length: int) -> Source:
    """Prompts of so many tokens each."""
    rng, known = np.random.default_rng(pool.seed), len(pool.tokenizer)
    common = known // 10  # special tokens and single bytes are below

    def following(count: int) -> list[Request]:
        return [Request("unrelated", rng.integers(common, known, length).tolist()) for _ in range(count)]

    return following


def unrelated(pool: Pool, batches: Sequence[int], prompts: int) -> Case:
    sampling = {"temperature": 1.0, "ignore_eos": True}
    return Case("unrelated", deal(random_words(pool, WORDS), batches, prompts), sampling)


def pilots(pool: Pool, batches: Sequence[int]) -> tuple[Case, Case]:
    """The loads after which step times are known: of ordinary prompts, and of long ones, which begin and end together."""
    sampling = {"temperature": 0.0, "ignore_eos": True}
    words = random_words(pool, PILOT_WORDS)
    long_groups = {batch: [words(batch) for _ in range(PILOT_GROUPS)] for batch in batches}
    ordinary = Case("pilot", deal(pool.take, batches, PILOT_PROMPTS, PILOT_GROUPS))
    return ordinary, Case("long pilot", long_groups, sampling)


CASES: dict[str, Callable[[Pool, Sequence[int], int], Case]] = {
    "mixed": partial(pooled, "mixed"), "tasks": tasks, "repeated": partial(pooled, "repeated", seen=1),
    "halves": partial(pooled, "halves", seen=2),
    "sampled": partial(pooled, "sampled", sampling={"temperature": 0.7}), "followup": followup, "long": long,
    "unrelated": unrelated, "streamed": partial(pooled, "streamed", chunk=1),
}  # fmt: skip
