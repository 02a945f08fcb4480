"""`python -m sglang_patches.early_exit --model MODEL --answers FILE --out FILE`: trains early exits for MIRROR.

The answers are the model's own, as `specstore distil` collects them from a running server. An interrupted run goes on where it was
when the same command is given again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_patches.early_exit.adapter import EarlyExits
from sglang_patches.early_exit.fingerprint import model_folder
from sglang_patches.early_exit.states import read_answers
from sglang_patches.early_exit.train import EPOCHS, SHOWN, Run, train

INTERRUPTED = 130  # exit status: 128 and the number of SIGINT, as shells have it


def arguments() -> argparse.Namespace:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        prog="python -m sglang_patches.early_exit",
        description=lines[0].partition(": ")[2],
        epilog=" ".join(lines[2:]),
    )
    parser.add_argument("--model", required=True, help="the target: a folder, or a name in the hub's cache")
    parser.add_argument(
        "--answers", required=True, nargs="+", type=Path, help="JSONL files with `prompt` and `answer`"
    )
    parser.add_argument("--out", required=True, type=Path, help="file of the early exits (safetensors)")
    parser.add_argument(
        "--epochs", type=_count, default=EPOCHS, help="times that all answers are read (%(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (%(default)s)")
    return parser.parse_args()


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{count} is below 1")
    return count


def table(exits: EarlyExits) -> Table:
    shown = Table("layers", *(f"target's token among the first {count}" for count in SHOWN), box=None)
    for layer, recalls in exits.about.recall.items():
        shown.add_row(f"{layer} of {exits.about.layers}", *(f"{recall:.2f}" for recall in recalls))
    return shown


def main() -> int:
    from transformers import AutoTokenizer

    given, console = arguments(), Console(stderr=True)
    try:
        folder = model_folder(given.model)
        texts = read_answers(given.answers, AutoTokenizer.from_pretrained(folder))
        exits = train(Run(folder, texts, given.out, given.epochs, given.device), console)
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on")
        return INTERRUPTED
    Console().print(table(exits))
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
