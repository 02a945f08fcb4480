"""`python -m sglang_patches.head --model MODEL --answers FILE --out FOLDER`: trains an EAGLE-3 head for a Llama.

The answers are the model's own, as `specstore distil` collects them from a running server. SGLang takes the folder as
--speculative-draft-model-path with --speculative-algorithm EAGLE3.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_patches.early_exit.fingerprint import model_folder
from sglang_patches.early_exit.states import read_answers
from sglang_patches.head.training import EPOCHS, train_shown


def arguments() -> argparse.Namespace:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        prog="python -m sglang_patches.head",
        description=lines[0].partition(": ")[2],
        epilog=" ".join(lines[2:]),
    )
    parser.add_argument("--model", required=True, help="the target: a folder, or a name in the hub's cache")
    parser.add_argument(
        "--answers", required=True, nargs="+", type=Path, help="JSONL files with `prompt` and `answer`"
    )
    parser.add_argument("--out", required=True, type=Path, help="an empty folder, or one that is made")
    parser.add_argument(
        "--epochs", type=int, default=EPOCHS, help="times that all answers are read (%(default)s)"
    )
    return parser.parse_args()


def main() -> int:
    from transformers import AutoTokenizer

    given = arguments()
    try:
        folder = model_folder(given.model)
        given.out.mkdir(parents=True, exist_ok=True)
        if any(given.out.iterdir()):
            raise ValueError(f"out: {given.out} is not empty")
        if given.epochs < 1:
            raise ValueError(f"epochs: {given.epochs} is below 1")
        texts = read_answers(given.answers, AutoTokenizer.from_pretrained(folder))
        train_shown(folder, texts, given.out, given.epochs)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
