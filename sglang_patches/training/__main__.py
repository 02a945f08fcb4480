"""`python -m sglang_patches.training exits|head --model MODEL --answers FILE --out OUT`: trains early exits or an EAGLE-3 head for a model.

The answers are the model's own, as `specstore collect` collects them from a running server.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from sglang_patches.early_exit.fingerprint import model_folder
from sglang_patches.training import EXIT_EPOCHS, HEAD_EPOCHS

if TYPE_CHECKING:
    from sglang_patches.early_exit.file import EarlyExits
    from sglang_patches.training.answers import Text

INTERRUPTED = 130  # exit status: 128 and the number of SIGINT, as shells have it


def arguments() -> argparse.Namespace:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        prog="python -m sglang_patches.training",
        description=lines[0].partition(": ")[2],
        epilog=" ".join(lines[2:]),
    )
    kinds = parser.add_subparsers(required=True, metavar="exits|head")
    about_exits = "early exits of the target, for MIRROR; an interrupted run goes on where it was when the same command is given again"
    trained = kinds.add_parser("exits", help=about_exits, description=about_exits)
    trained.set_defaults(make=make_exits)
    _add_common(trained, "file of the early exits (safetensors)", EXIT_EPOCHS)
    trained.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (%(default)s)")
    about_head = "an EAGLE-3 head of a Llama; SGLang takes the folder as --speculative-draft-model-path with --speculative-algorithm EAGLE3"
    trained = kinds.add_parser("head", help=about_head, description=about_head)
    trained.set_defaults(make=make_head)
    _add_common(trained, "an empty folder, or one that is made", HEAD_EPOCHS)
    return parser.parse_args()


def _add_common(parser: argparse.ArgumentParser, out: str, epochs: int) -> None:
    """Adds the options of both kinds.

    out: what --out is.
    epochs: by default.
    """
    parser.add_argument("--model", required=True, help="the target: a folder, or a name in the hub's cache")
    parser.add_argument(
        "--answers", required=True, nargs="+", type=Path, help="JSONL files with `prompt` and `answer`"
    )
    parser.add_argument("--out", required=True, type=Path, help=out)
    parser.add_argument(
        "--epochs", type=_count, default=epochs, help="times that all answers are read (%(default)s)"
    )


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{count} is below 1")
    return count


def make_exits(given: argparse.Namespace, model: Path, texts: Sequence[Text], console: Console) -> None:
    from sglang_patches.training import exits

    run = exits.Run(model, texts, given.out, given.epochs, given.device)
    Console().print(table(exits.train(run, console)))


def table(made: EarlyExits) -> Table:
    from sglang_patches.training.exits import SHOWN

    counts = (f"target's token among the first {count}" for count in SHOWN)
    shown = Table("layers", *counts, box=None)
    for layer, recalls in made.about.recall.items():
        shown.add_row(f"{layer} of {made.about.layers}", *(f"{recall:.2f}" for recall in recalls))
    return shown


def make_head(given: argparse.Namespace, model: Path, texts: Sequence[Text], console: Console) -> None:
    from sglang_patches.training import heads

    heads.train_shown(model, texts, given.out, given.epochs, console)


def _empty_folder(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"out: {out} is not empty")


def main() -> int:
    given, console = arguments(), Console(stderr=True)
    # After the options are read: these import torch.
    from transformers import AutoTokenizer

    from sglang_patches.training.answers import read_answers

    try:
        model = model_folder(given.model)
        if given.make is make_head:
            _empty_folder(given.out)
        texts = read_answers(given.answers, AutoTokenizer.from_pretrained(model))
        given.make(given, model, texts, console)
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted" + ("; the same command goes on" if given.make is make_exits else ""))
        return INTERRUPTED
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
