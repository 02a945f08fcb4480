"""`python -m benchmarks.predictions`: what a `prediction` saves by the number of its edits, and what one of another text costs.

The demo model cannot edit a file. So it writes a text of its own, greedily, with a repetition penalty that keeps it from looping. The
prediction is that text with words replaced, left out and put in: the answer is the edit of the prediction. The server's datastore is
empty and remembers no answer. One request at a time; times are from the first tokens that come to the last.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.options import Parser, add_dtype
from benchmarks.prompts import SHIPPED, chat_ids, load_prompts, spread
from benchmarks.report.records import finish
from benchmarks.report.statistics import ratio_of_sums, throughput_ratio
from benchmarks.serve.measure import answer
from sglang_patches.demo.model import ensure
from tests.support.servers.engine import ServerSpec, exit_when_terminated, running

PLAIN, NONE, ANOTHER = "plain", "none", "another text"
PENALTY = 1.15  # of repetition
CHUNK = 8  # tokens that a server sends together


def edited(text: str, edits: int, seed: int) -> str:
    """The text with so many of its words replaced, left out, or doubled by another, in turn and at random places."""
    words = text.split(" ")
    random_ = random.Random(seed)
    for turn, place in enumerate(random_.sample(range(len(words)), min(edits, len(words)))):
        other = random_.choice(words)
        words[place] = (other, "", f"{words[place]} {other}")[turn % 3]
    return " ".join(words)


def predictions(texts: Sequence[str], place: int, edits: Sequence[int]) -> dict[str, str | None]:
    """What is sent with the prompt of one text, by the way's name; None for no prediction."""
    ways: dict[str, str | None] = {PLAIN: None, NONE: None, ANOTHER: texts[place - 1]}
    return ways | {f"{number} edits": edited(texts[place], number, place) for number in edits}


def played(
    texts: Sequence[str], edits: Sequence[int], ask: Callable[[int, str, str | None], dict]
) -> Iterator[dict]:
    """A row for each text and way; which way begins changes from text to text. Raises RuntimeError if an answer depends on the way.

    ask: text's place, way, prediction -> what was measured."""
    for place in range(len(texts)):
        ways = list(predictions(texts, place, edits).items())
        first = place % len(ways)
        said = set()
        for way, prediction in (*ways[first:], *ways[:first]):
            row = ask(place, way, prediction)
            said.add(tuple(row.pop("answer")))
            yield {"text": place, "way": way} | row
        if len(said) > 1:
            raise RuntimeError(f"text {place}: the answer depends on the prediction")


def summarised(rows: Sequence[dict]) -> list[dict]:
    """A row for each way: tokens per step, and throughput over that without a prediction, with intervals over texts."""

    def of(way: str, field: str) -> list[float]:
        return [row[field] for row in sorted(rows, key=lambda row: row["text"]) if row["way"] == way]

    base = of(NONE, "timed"), of(NONE, "seconds")
    return [
        {
            "way": way,
            "tokens_per_step": ratio_of_sums(of(way, "tokens"), of(way, "steps")),
            "over_none": throughput_ratio(of(way, "timed"), of(way, "seconds"), *base),
        }
        for way in dict.fromkeys(row["way"] for row in sorted(rows, key=lambda row: row["text"]))
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("predictions", __doc__)
    parser.add("--model", None, "folder of the model (default: the demo model)", type=Path)
    parser.add("--texts", 10, "that the model writes")
    parser.add("--tokens", 1200, "of a text")
    parser.add("--edits", [4, 24], "of a prediction")
    parser.add("--nodes", 15, "drafted tokens a tree")
    add_dtype(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    from transformers import AutoTokenizer

    exit_when_terminated()
    model = given.model or ensure()
    prompts = chat_ids(AutoTokenizer.from_pretrained(model), spread(load_prompts(SHIPPED), given.texts))
    sampling = {
        "temperature": 0, "repetition_penalty": PENALTY, "max_new_tokens": given.tokens, "ignore_eos": True, "stream_interval": CHUNK,
    }  # fmt: skip
    specs = {  # with overlap scheduling SGLang's own penalties lag a token behind
        PLAIN: ServerSpec(PLAIN, model, None, given.dtype, max_running_requests=1, overlap=False),
        NONE: ServerSpec("sssd", model, "SSSD", given.dtype, given.nodes, flags=("--specstore-publish", "off"), max_running_requests=1),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = {name: stack.enter_context(running(spec, Path(folder))) for name, spec in specs.items()}

        def ask(place: int, way: str, prediction: str | None) -> dict:
            said = {"custom_params": {"specstore": {"reference": prediction}}} if prediction else {}
            found = answer(servers.get(way, servers[NONE]), prompts[place], sampling | said)
            return {
                "tokens": found.counts[-1] - 1, "steps": found.steps, "answer": found.tokens,
                "timed": found.counts[-1] - found.counts[1], "seconds": found.times[-1] - found.times[1],
            }  # fmt: skip

        texts = [servers[PLAIN].generate(prompt, **sampling)["text"] for prompt in prompts]
        steps, console = len(texts) * (3 + len(given.edits)), Console(stderr=True)
        rows = list(track(played(texts, given.edits, ask), "answers", steps, console=console))
    finish("predictions", given, [SHIPPED], results=summarised(rows), answers=rows)


if __name__ == "__main__":
    main()
