"""`python -m benchmarks.replay`: tokens per step of every drafting method, on recorded answers."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.options import Parser
from benchmarks.replay.experiments import EXPERIMENTS, SLOW, Setting
from benchmarks.replay.footprint import footprint
from benchmarks.replay.methods import NEEDS_PEERS, available
from benchmarks.report.records import finish
from benchmarks.sources import SUFFIXES, source_documents
from benchmarks.traces import SHIPPED, SHIPPED_LANGUAGE, SHIPPED_PRIOR, Trace, by_category, load_traces

KIND_TOKENS = 1_000_000  # of each kind of text


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("replay", __doc__)
    add = parser.add
    usual = [name for name in EXPERIMENTS if name not in SLOW]
    add("--experiments", usual, "what is asked", choices=EXPERIMENTS)
    add("--traces", [SHIPPED], "answers to replay: files of python -m benchmarks.record")
    add("--prior", [SHIPPED_PRIOR], "answers to other prompts, likewise")
    add("--language", [SHIPPED_LANGUAGE], "answers in another language, likewise")
    dataset = (
        "the model's answers to a dataset's training questions, and the dataset's own (field answer), tried on the traces of a"
        " category"
    )
    add("--dataset", None, dataset, nargs=3, metavar=("CATEGORY", "RECORDED", "DATASET"))
    add("--per-category", 1000, "traces of each")
    add("--nodes", [4, 8, 16, 32, 64], "of a draft")
    add("--tokenizer", None, "tokenizer.json: of --dataset, --footprint and the experiment kinds", type=Path)
    add("--footprint", 0, "also index that much of Python's sources", metavar="TOKENS")
    add("--vocab-size", 49152, "of the answers")
    add("--seed", 0, "of the order of the traces")
    given = parser.parse_args(argv)
    if (given.dataset or given.footprint or "kinds" in given.experiments) and not given.tokenizer:
        parser.error("--tokenizer: needed by --dataset, --footprint and the experiment kinds")
    if given.dataset:
        category, *files = given.dataset
        given.dataset = (category, *map(Path, files))
    return given


def chosen(traces: Sequence[Trace], per_category: int, seed: int) -> list[Trace]:
    """The first ones of each category, all in a random order, as requests come to a server."""
    mixed = [trace for rows in by_category(traces).values() for trace in rows[:per_category]]
    random.Random(seed).shuffle(mixed)
    return mixed


def answers(files: Sequence[Path]) -> list[np.ndarray]:
    return [trace.output for trace in load_traces(*files)]


def dataset_answers(file: Path, count: int, tokenizer: Tokenizer) -> list[np.ndarray]:
    rows = [json.loads(line) for line in file.read_text().splitlines()[:count]]
    return [np.array(tokenizer.encode(row["answer"]).ids, np.int32) for row in rows]


def setting_of(given: argparse.Namespace) -> Setting:
    entries, category = {}, ""
    if given.dataset:
        category, recorded, dataset = given.dataset
        own = answers([recorded])
        theirs = dataset_answers(dataset, len(own), Tokenizer.from_file(str(given.tokenizer)))
        entries = {"the model's": own, "the dataset's": theirs}
    return Setting(
        chosen(load_traces(*given.traces), given.per_category, given.seed), answers(given.prior), answers(given.language),
        entries, category, given.nodes, given.vocab_size, kinds_of(given),
    )  # fmt: skip


def kinds_of(given: argparse.Namespace) -> dict[str, list[np.ndarray]]:
    """The texts of the experiment kinds, if it is asked for."""
    if "kinds" not in given.experiments:
        return {}
    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    return {kind: source_documents(tokenizer, KIND_TOKENS, given.seed, kind) for kind in SUFFIXES}


def files_of(given: argparse.Namespace) -> list[Path]:
    return [*given.traces, *given.prior, *given.language, *(given.dataset or ())[1:]]


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    setting = setting_of(given)
    results = {name: EXPERIMENTS[name](setting) for name in given.experiments}
    results = {
        name: records for name, records in results.items() if records
    }  # of entries none without --dataset
    if given.footprint:
        tokenizer = Tokenizer.from_file(str(given.tokenizer))
        documents = source_documents(tokenizer, given.footprint)
        results["footprint"] = footprint(documents, tokenizer.get_vocab_size())
    missing = sorted(set(NEEDS_PEERS) - set(available()))
    finish("replay", given, files_of(given), missing=missing, results=results)


if __name__ == "__main__":
    main()
