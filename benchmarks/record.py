"""`python -m benchmarks.record`: a served model's own greedy answers, as a corpus for `specstore build` and to be replayed.

Prompts come from files, or from the model itself: given a chat's beginning up to the user's turn, it writes what users
ask (Magpie, Xu et al. 2025, the procedure by which the SSSD paper fills its datastore, section 4.1). So a prior needs
nothing but the model.

One JSONL line a prompt: its category and text, the answer's text, and the token ids of both (`specstore build --field
tokens` takes the answer's: the exact tokens that the server will generate again, which encoding the text anew would
not always give; benchmarks.traces reads them). A run that was interrupted goes on after the last complete line.

It starts a server of its own, and what it records is for benchmarks. `specstore collect` asks a running server and is for users.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.options import NEEDED, Parser, add_dtype
from benchmarks.prompts import Prompt, chat_ids, load_prompts
from datastore_service.answers.answer_file import AnswerFile
from datastore_service.storage.errors import StorageError
from tests.support.servers.engine import Endpoint, ServerSpec, exit_when_terminated, running

OWN_CATEGORY = "own"  # of prompts that the model wrote
QUESTION_TOKENS = (4, 128)  # of them
PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"  # where a chat template puts the user's text


def unanswered(prompts: Sequence[Prompt], file: AnswerFile) -> list[Prompt]:
    """Raises StorageError if the file answers other prompts."""
    return [prompts[index] for index, _ in file.missing([prompt.text for prompt in prompts])]


def question_start(tokenizer) -> list[int]:
    """Token ids of a chat up to where the user's text begins."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": PLACE}], tokenize=False)
    return tokenizer.encode(chat[: chat.index(PLACE)], add_special_tokens=False)


def own_prompts(server: Endpoint, tokenizer, batch: int, known: Iterable[str]) -> Iterator[Prompt]:
    """Complete and different questions that the model asks itself, none of them in `known`, without end."""
    start, (shortest, longest) = question_start(tokenizer), QUESTION_TOKENS
    found = set(known)
    while True:
        for question in server.generate_many([start] * batch, batch, temperature=1.0, max_new_tokens=longest):
            text = question["text"].strip()
            complete = question["meta_info"]["finish_reason"]["type"] == "stop"
            if complete and len(question["output_ids"]) > shortest and text not in found:
                found.add(text)
                yield Prompt(OWN_CATEGORY, text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("record", __doc__, records=False)
    parser.add("--model", None, "folder of the model that answers", **NEEDED)
    parser.add("--prompts", None, "files of prompts; left out: the model writes them", type=Path, nargs="+")
    parser.add("--count", 500, "prompts of each file, from its start; or to write")
    parser.add("--batch", 16, "requests at once")
    parser.add("--max-tokens", 192, "of an answer")
    add_dtype(parser)
    parser.add("--out", None, "file that the answers are appended to", **NEEDED)
    return parser.parse_args(argv)


def record(
    server: Endpoint, tokenizer, prompts: Sequence[Prompt], batch: int, max_tokens: int, file: AnswerFile
) -> None:
    """Appends a line a prompt, a batch at a time."""
    prompt_ids = chat_ids(tokenizer, prompts)
    answers = server.generate_many(prompt_ids, batch, temperature=0, max_new_tokens=max_tokens)
    for prompt, ids, answer in zip(prompts, prompt_ids, answers, strict=True):
        row = {
            "category": prompt.category, "prompt": prompt.text, "prompt_tokens": ids,
            "answer": answer["text"], "tokens": answer["output_ids"],
        }  # fmt: skip
        file.append(row)


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    from transformers import AutoTokenizer

    exit_when_terminated()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    try:
        answer_all(given, tokenizer)
    except StorageError as error:
        sys.exit(f"--out {error}")


def answer_all(given: argparse.Namespace, tokenizer) -> None:
    """Raises StorageError for a file that cannot be continued."""
    prompts = [prompt for file in given.prompts or () for prompt in load_prompts(file)[: given.count]]
    spec = ServerSpec("record", given.model, dtype=given.dtype, max_running_requests=given.batch)
    with AnswerFile(given.out) as file, tempfile.TemporaryDirectory() as folder:
        rest = unanswered(prompts, file) if given.prompts else []
        missing = len(rest) if given.prompts else given.count - len(file)
        with running(spec, Path(folder)) as server:
            known = [prompt for prompt, _ in file.answered]
            source = iter(rest) if given.prompts else own_prompts(server, tokenizer, given.batch, known)
            for start in track(range(0, missing, given.batch), "answers", console=Console(stderr=True)):
                group = list(itertools.islice(source, min(given.batch, missing - start)))
                record(server, tokenizer, group, given.batch, given.max_tokens, file)


if __name__ == "__main__":
    main()
