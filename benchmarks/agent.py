"""`python -m benchmarks.agent`: an agent's loop over stock SGLang, its NGRAM, SSSD, and SSSD that knows session and file.

Each task is a function from a package of the lock file. The agent reads it, asks for the whole file with a change, is told by tests that
never pass, and asks again in the same conversation. The demo model is too small to edit; it repeats the file with errors of its own,
which is what most of an edit's tokens are. Each way has a server and a datastore of its own, which remembers earlier tasks.
Decoding is timed from the first tokens that come to the last, an answer from the request on.
"""

from __future__ import annotations

import argparse
import ast
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track

from benchmarks.options import Parser, add_dtype
from benchmarks.report.records import finish
from benchmarks.report.statistics import ratio_of_sums, throughput_ratio
from benchmarks.serve.measure import answer
from benchmarks.sources import texts
from sglang_patches.demo.model import ensure
from tests.support.servers.engine import ServerSpec, SglangServer, exit_when_terminated, running

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN, NGRAM, UNNAMED, NAMED = "plain", "NGRAM", "SSSD", "SSSD, session and file named"
ALGORITHMS = {PLAIN: None, NGRAM: "NGRAM", UNNAMED: "SSSD", NAMED: "SSSD"}
LINES = range(12, 31)  # of a function
WISH = "Repeat the whole file, with a fixed function `{}`."
FIRST = "Repeat this Python file:\n\n```python\n{}\n```\n\n" + WISH
AGAIN = "The tests say: FAILED (failures={}): {} is not what `{}` returns\n\n" + WISH
CHUNK = 8  # tokens that a server sends together


@dataclass(frozen=True)
class Task:
    """name: of the function. source: the file, which has nothing else."""

    name: str
    source: str

    def message(self, turn: int) -> str:
        """What the agent says in a turn, from 0 on."""
        if not turn:
            return FIRST.format(self.source, self.name)
        found = random.Random(f"{self.name} {turn}").randrange(1000)
        return AGAIN.format(turn, found, self.name, self.name)


def tasks(count: int, sources: Iterable[str]) -> list[Task]:
    """The first function of suitable length in each of as many files as it takes, no name twice. Raises ValueError if the files have
    fewer."""
    found: dict[str, Task] = {}
    for text in sources:
        function = next(filter(_suits, ast.parse(text).body), None)
        if isinstance(function, ast.FunctionDef) and function.name not in found:
            found[function.name] = Task(function.name, ast.get_source_segment(text, function) or "")
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"tasks: the packages' files have {len(found)}, {count} are wanted")


def _suits(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.FunctionDef)
        and not node.name.startswith("test")
        and (node.end_lineno or 0) - node.lineno in LINES
    )


class Agent:
    """Goes through a task's turns with one server. What the model answers is in the next turn's prompt."""

    def __init__(self, server: SglangServer, way: str, tokenizer: PreTrainedTokenizerBase, most: int) -> None:
        self._server, self._named, self._tokenizer = server, way == NAMED, tokenizer
        self._sampling = {"temperature": 0, "max_new_tokens": most, "stream_interval": CHUNK}

    def work(self, task: Task, place: int, turns: int) -> dict:
        """What all answers took together."""
        said: list[dict] = []
        answers: list[list[int]] = []
        row = dict.fromkeys(("tokens", "steps", "timed", "seconds", "all_tokens", "all_seconds"), 0.0)
        named = {"conversation": f"task {place}", "reference": task.source}
        hints = {"custom_params": {"specstore": named}} if self._named else {}
        for turn in range(turns):
            said.append({"role": "user", "content": task.message(turn)})
            prompt = self._tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
            found = answer(self._server, prompt, self._sampling | hints)
            text = self._tokenizer.decode(found.tokens, skip_special_tokens=True)
            said.append({"role": "assistant", "content": text})
            answers.append(found.tokens)
            for name, more in (
                ("tokens", found.counts[-1] - 1), ("steps", found.steps),
                ("timed", found.counts[-1] - found.counts[1]), ("seconds", found.times[-1] - found.times[1]),
                ("all_tokens", found.counts[-1]), ("all_seconds", found.times[-1] - found.times[0]),
            ):  # fmt: skip
                row[name] += more
        return row | {"answers": answers}


def played(
    given: Sequence[Task], ways: Sequence[str], work: Callable[[str, Task, int], dict]
) -> Iterator[dict]:
    """A row for each task and way; which way begins changes from task to task.

    work: way, task, its place -> what was measured."""
    for place, task in enumerate(given):
        first = place % len(ways)
        for way in (*ways[first:], *ways[:first]):
            yield {"task": place, "way": way} | work(way, task, place)


def summarised(rows: Sequence[dict], ways: Sequence[str]) -> list[dict]:
    """A row for each way: tokens per step, throughput over plain, and the share of tasks whose answers are plain's, to the last token."""

    def of(way: str, field: str) -> list:
        return [row[field] for row in sorted(rows, key=lambda row: row["task"]) if row["way"] == way]

    return [
        {
            "way": way,
            "tokens_per_step": ratio_of_sums(of(way, "tokens"), of(way, "steps")),
            "decoding": throughput_ratio(
                of(way, "timed"), of(way, "seconds"), of(PLAIN, "timed"), of(PLAIN, "seconds")
            ),
            "answers": throughput_ratio(
                of(way, "all_tokens"),
                of(way, "all_seconds"),
                of(PLAIN, "all_tokens"),
                of(PLAIN, "all_seconds"),
            ),
            "same": sum(map(list.__eq__, of(way, "answers"), of(PLAIN, "answers")))
            / len(of(PLAIN, "answers")),
        }
        for way in ways
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("agent", __doc__)
    parser.add("--model", None, "folder of the model (default: the demo model)", type=Path)
    parser.add("--tasks", 20, "of the agent")
    parser.add("--turns", 3, "answers to each")
    parser.add("--tokens", 160, "most of an answer")
    parser.add("--nodes", 15, "drafted tokens a tree")
    add_dtype(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    from transformers import AutoTokenizer

    exit_when_terminated()
    model = given.model or ensure()
    tokenizer = AutoTokenizer.from_pretrained(model)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        agents = {}
        for number, (way, algorithm) in enumerate(ALGORITHMS.items()):
            spec = ServerSpec(
                f"agent-{number}", model, algorithm, given.dtype, given.nodes, max_running_requests=1
            )
            agents[way] = Agent(
                stack.enter_context(running(spec, Path(folder))), way, tokenizer, given.tokens
            )
        steps = played(
            tasks(given.tasks, texts()),
            list(ALGORITHMS),
            lambda way, task, place: agents[way].work(task, place, given.turns),
        )
        rows = list(track(steps, "tasks", given.tasks * len(ALGORITHMS), console=Console(stderr=True)))
    results = summarised(rows, list(ALGORITHMS))
    finish("agent", given, results=results, tasks=[row | {"answers": len(row["answers"])} for row in rows])


if __name__ == "__main__":
    main()
