"""`python -m benchmarks.record`: a served model's own greedy answers to a prompt file, as a corpus for `specstore build`.

One JSONL line a prompt: its category and text, the answer's text, and the token ids of both (`specstore build --field
tokens` takes the answer's: the exact tokens that the server will generate again, which encoding the text anew would
not always give; benchmarks.traces replays them). A run that was interrupted goes on after the last complete line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.prompts import Prompt, chat_ids, load_prompts
from benchmarks.servers import ServerSpec, running


def answered(out: Path, prompts: Sequence[Prompt]) -> int:
    """Complete lines of a file; an unfinished last line is cut off. Exits if they answer other prompts."""
    if not out.exists():
        return 0
    lines = out.read_bytes().split(b"\n")[:-1]
    if [json.loads(line)["prompt"] for line in lines] != [prompt.text for prompt in prompts[: len(lines)]]:
        sys.exit(f"--out {out}: holds answers to other prompts")
    out.write_bytes(b"".join(line + b"\n" for line in lines))
    return len(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=500, help="prompts of each file, from its start")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    from transformers import AutoTokenizer

    given = parse(argv)
    prompts = [prompt for file in given.prompts for prompt in load_prompts(file)[: given.count]]
    rest = prompts[answered(given.out, prompts) :]
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    spec = ServerSpec("record", given.model, dtype=given.dtype, max_running_requests=given.batch)
    with (
        tempfile.TemporaryDirectory() as folder,
        running(spec, Path(folder)) as server,
        given.out.open("a") as out,
    ):
        starts = range(0, len(rest), given.batch)
        for start in track(starts, "answers", console=Console(stderr=True)):
            group = rest[start : start + given.batch]
            prompt_ids = chat_ids(tokenizer, group)
            answers = server.generate_many(
                prompt_ids, given.batch, temperature=0, max_new_tokens=given.max_tokens
            )
            for prompt, ids, answer in zip(group, prompt_ids, answers, strict=True):
                row = {
                    "category": prompt.category, "prompt": prompt.text, "prompt_tokens": ids,
                    "answer": answer["text"], "tokens": answer["output_ids"],
                }  # fmt: skip
                out.write(json.dumps(row) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
