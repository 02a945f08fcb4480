"""`python -m benchmarks.edits`: answers that are edits of a file which the client has, against plain decoding and NGRAM.

Each task is a file of this project, and two edits of it that were made. The demo model cannot edit, but it copies: the prompt
shows the file as the edit left it, the model says that, and the file as it was before the edit is the `prediction`. So the answer is the model's own,
and differs from the prediction by the edit. A second turn has the next edit. Times are from the first tokens that come to the last.

plain, ngram       servers of their own
sssd               embedded datastore, empty, which keeps no output; the file is in the prompt
session            the same server; the client names the session of the two turns
prediction         the same, and sends the file as it was
prediction alone   the same, and nothing else drafts: neither the prompt nor the answer's own text
wrong prediction   as prediction, with another task's file
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.options import NEEDED, Parser, add_dtype
from benchmarks.report.records import finish
from benchmarks.report.statistics import ratio_of_sums, throughput_ratio
from benchmarks.serve.measure import answer
from tests.support.servers.engine import ServerSpec, SglangServer, exit_when_terminated, running

DATA = Path(__file__).parent / "data" / "edits.jsonl.gz"
KINDS = ("short", "long")
WAYS = ("plain", "ngram", "sssd", "session", "prediction", "prediction alone", "wrong prediction")
BASELINES = ("plain", "session")
ALGORITHMS = {"plain": None, "ngram": "NGRAM", "sssd": "SSSD"}  # of the servers
SERVER_OF = dict.fromkeys(WAYS[3:], "sssd")  # of the other ways
WISH = "Repeat this file.\n\n{}"
FILE = "```python\n{}```"
BEGINNING = "```python\n"  # of each answer
CHUNK = 8  # tokens that a server sends together


@dataclass(frozen=True)
class Turn:
    """The file before and after one edit. said: the conversation before it, as chat messages."""

    task: str
    number: int
    before: str
    after: str
    said: tuple[dict, ...]

    @property
    def messages(self) -> list[dict]:
        return [*self.said, {"role": "user", "content": WISH.format(FILE.format(self.after))}]


def turns_of(row: dict) -> Iterator[Turn]:
    said: tuple[dict, ...] = ()
    before = row["before"]
    for number, after in enumerate(row["after"]):
        turn = Turn(row["path"], number, before, after, said)
        yield turn
        said = (*turn.messages, {"role": "assistant", "content": FILE.format(after)})
        before = after


def read_tasks(kind: str) -> list[dict]:
    with gzip.open(DATA, "rt") as file:
        return [row for row in map(json.loads, file) if row["kind"] == kind]


def specs(ways: Sequence[str], model: Path, dtype: str) -> dict[str, ServerSpec]:
    """The servers that the ways need. None remembers an answer for the next way."""
    names = {SERVER_OF.get(way, way) for way in ways}
    quiet = {"sssd": ("--specstore-publish", "off")}
    return {
        name: ServerSpec(
            name, model, ALGORITHMS[name], dtype, flags=quiet.get(name, ()), max_running_requests=1
        )
        for name in sorted(names)
    }


def wishes(way: str, turn: Turn, other: str) -> dict:
    """The sampling parameters that say something to specstore. other: another task's file."""
    if way not in SERVER_OF:
        return {}
    said: dict[str, object] = {"conversation": f"{way}/{turn.task}"}
    if "prediction" in way:
        said["reference"] = other if way == "wrong prediction" else turn.before
    if way == "prediction alone":
        said["draft"] = ["reference"]
    return {"custom_params": {"specstore": said}}


def measured(
    server: SglangServer, prompt: Sequence[int], way: str, turn: Turn, other: str, most: int
) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": most, "stream_interval": CHUNK}
    found = answer(server, prompt, sampling | wishes(way, turn, other))
    tokens = found.counts[-1]
    return {
        "way": way, "task": turn.task, "turn": turn.number, "tokens": tokens - 1, "steps": found.steps,
        "timed": tokens - found.counts[1], "seconds": found.times[-1] - found.times[1], "answer": found.tokens,
    }  # fmt: skip


def summarised(rows: Sequence[dict]) -> list[dict]:
    """A row for each way: tokens per step, and its throughput over those of BASELINES, with intervals over tasks."""
    tasks = sorted({row["task"] for row in rows})

    def of(way: str, field: str) -> list[float]:
        chosen = [row for row in rows if row["way"] == way]
        return [sum(row[field] for row in chosen if row["task"] == task) for task in tasks]

    asked = [way for way in WAYS if any(row["way"] == way for row in rows)]
    throughput = {way: (of(way, "timed"), of(way, "seconds")) for way in asked}
    return [
        {"way": way, "tokens_per_step": ratio_of_sums(of(way, "tokens"), of(way, "steps"))}
        | {
            f"over_{base}": throughput_ratio(*throughput[way], *throughput[base])
            for base in BASELINES
            if base in asked
        }
        for way in asked
    ]


def played(
    tasks: Sequence[dict], ways: Sequence[str], ask: Callable[[str, Turn, str], dict]
) -> Iterator[dict]:
    """Both turns of every task in every way; which way begins changes from task to task. ask: way, turn and another task's file ->
    what was measured."""
    for number, task in enumerate(tasks):
        at = number % len(ways)
        for way in (*ways[at:], *ways[:at]):
            for turn in turns_of(task):
                yield ask(way, turn, tasks[number - 1]["before"])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("edits", __doc__)
    parser.add("--model", None, "folder of the model", **NEEDED)
    parser.add("--kind", KINDS[0], "of the files: 40 to 90 lines, or about 300", choices=KINDS)
    parser.add("--ways", list(WAYS), "who is asked, and what is said", choices=WAYS)
    parser.add("--tasks", 20, "at most")
    parser.add("--max-tokens", 300, "of an answer")
    add_dtype(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    from transformers import AutoTokenizer

    exit_when_terminated()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tasks = read_tasks(given.kind)[: given.tasks]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = {
            name: stack.enter_context(running(spec, Path(folder)))
            for name, spec in specs(given.ways, given.model, given.dtype).items()
        }

        def ask(way: str, turn: Turn, other: str) -> dict:
            chat = tokenizer.apply_chat_template(turn.messages, add_generation_prompt=True, tokenize=False)
            prompt = tokenizer(chat + BEGINNING, add_special_tokens=False)["input_ids"]
            return measured(servers[SERVER_OF.get(way, way)], prompt, way, turn, other, given.max_tokens)

        steps = 2 * len(tasks) * len(given.ways)
        console = Console(stderr=True)
        rows = list(track(played(tasks, given.ways, ask), "answers", steps, console=console))
    finish("edits", given, [DATA], results=summarised(rows), answers=rows)


if __name__ == "__main__":
    main()
