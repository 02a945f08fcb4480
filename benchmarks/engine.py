"""`python -m benchmarks.engine`: how long a draft takes, on real tokens, in one thread.

Python sources stand in the prior; other files, as if a model had just written them, stand in the live tier; further
files are replayed as sessions, a step at a time, each step adding what the draft got right and one token more. What is
timed is `Engine.step`, Python included: the call that the plugin and the service make.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.manifest import manifest
from benchmarks.sources import source_documents
from datastore_service.engine.engine import Engine
from datastore_service.engine.segment import Segment, build_segment
from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import Budget, Entry, Opening

MILLION = 1_000_000
LIVE_TOKENS = 256_000
REPLAYED_TOKENS = 400_000
PROMPT = 256
STEPS = 64  # of a session
DRAFTS = ((1, Budget(nodes=16)), (32, Budget(nodes=4)))


@dataclass(frozen=True)
class Load:
    """prior: documents by growing size wanted. live, replayed: documents that are not in it."""

    prior: list[np.ndarray]
    live: list[np.ndarray]
    replayed: list[np.ndarray]


def split(documents: Sequence[np.ndarray]) -> Load:
    """Deals documents to the replay, the live tier and the prior, in that order."""
    ends = np.cumsum([len(document) for document in documents])
    first, second = np.searchsorted(ends, (REPLAYED_TOKENS, REPLAYED_TOKENS + LIVE_TOKENS)) + 1
    return Load(list(documents[second:]), list(documents[first:second]), list(documents[:first]))


def prior_of(documents: Sequence[np.ndarray], tokens: int, vocab_size: int) -> Segment:
    ends = np.cumsum([len(document) for document in documents])
    return build_segment(documents[: int(np.searchsorted(ends, tokens)) + 1], vocab_size)


def accepted(tree: DraftTree, text: np.ndarray) -> int:
    """Drafted tokens that the text goes on with."""
    node, count = -1, 0
    for token in text:
        chosen = np.flatnonzero((tree.parents == node) & (tree.tokens == token))
        if len(chosen) == 0:
            break
        node, count = int(chosen[0]), count + 1
    return count


def publish(engine: Engine, documents: Sequence[np.ndarray]) -> None:
    """The documents as outputs of closed sessions, found from the live tier's fresh text and segments."""
    for i, document in enumerate(documents):
        engine.step([Entry(f"live{i}", 0, document, opening=Opening(publish=True), closing=True)])
    engine.settle()


def replay(
    engine: Engine, documents: Sequence[np.ndarray], batch: int, budget: Budget
) -> tuple[list[int], int, int]:
    """Nanoseconds of each step, tokens they added, sessions' steps taken. The prompts are sent before, as a worker does while
    it prefills. Unpublished, so that a later replay finds the same tiers."""
    nanoseconds, tokens, steps = [], 0, 0
    long = [document for document in documents if len(document) >= PROMPT + 4 * STEPS]
    for first in range(0, len(long) - batch + 1, batch):
        texts = long[first : first + batch]
        engine.step(
            [Entry(str(i), 0, text[:PROMPT], opening=Opening(publish=False)) for i, text in enumerate(texts)]
        )
        begin, end = [PROMPT] * batch, [PROMPT + 1] * batch
        for _ in range(STEPS):
            entries = [
                Entry(str(i), a, text[a:b], budget=budget)
                for i, (text, a, b) in enumerate(zip(texts, begin, end, strict=True))
            ]
            started = time.perf_counter_ns()
            replies = engine.step(entries)
            nanoseconds.append(time.perf_counter_ns() - started)
            begin = end
            gains = [accepted(r.tree, t[e:]) + 1 for r, t, e in zip(replies, texts, end, strict=True)]
            end = [min(e + gain, len(t) - 1) for e, gain, t in zip(end, gains, texts, strict=True)]
            tokens, steps = tokens + sum(gains), steps + batch
            if any(a == b for a, b in zip(begin, end, strict=True)):
                break
        engine.step([Entry(str(i), closing=True) for i in range(batch)])
    return nanoseconds, tokens, steps


def measure(load: Load, size: int, vocab_size: int) -> list[dict]:
    """One record a batch size, with a prior of `size` tokens."""
    started = time.perf_counter()
    prior = prior_of(load.prior, size, vocab_size)
    built = time.perf_counter() - started
    engine = Engine(vocab_size, [prior])
    publish(engine, load.live)
    records = []
    for batch, budget in DRAFTS:
        replay(engine, load.replayed[: 4 * batch], batch, budget)  # first touches of the prior's pages
        nanoseconds, tokens, steps = replay(engine, load.replayed, batch, budget)
        low, middle, high = np.percentile(np.array(nanoseconds) / 1e3, (10, 50, 99))
        records.append(
            {
                "prior_tokens": len(prior), "prior_bytes": prior.nbytes, "build_seconds": built, "batch": batch,
                "nodes": budget.nodes, "steps": len(nanoseconds), "p10_us": low, "p50_us": middle, "p99_us": high,
                "tokens_per_step": tokens / steps,
            }
        )  # fmt: skip
    return records


def show(records: Sequence[dict]) -> None:
    table = Table(title="one step of the engine, one thread, session + live + prior")
    headings = ("prior", "bytes/token", "built in", "batch", "nodes", "steps", "p50", "p99", "tokens/step")
    for heading in headings:
        table.add_column(heading, justify="right")
    for r in records:
        table.add_row(
            f"{r['prior_tokens'] / MILLION:.1f} M", f"{r['prior_bytes'] / r['prior_tokens']:.2f}",
            f"{r['build_seconds']:.1f} s", str(r["batch"]), str(r["nodes"]), str(r["steps"]),
            f"{r['p50_us']:.1f} µs", f"{r['p99_us']:.1f} µs", f"{r['tokens_per_step']:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)


def plot(records: Sequence[dict], path: Path) -> None:
    """Step time over the prior's size, log-log; a line a batch size and percentile."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(
        xlabel="tokens of the prior",
        ylabel="µs a step",
        xscale="log",
        yscale="log",
        title="Engine.step, one thread",
    )
    for batch, budget in DRAFTS:
        rows = [r for r in records if r["batch"] == batch]
        sizes = [r["prior_tokens"] for r in rows]
        for name, style in (("p50_us", "-o"), ("p99_us", "--o")):
            label = f"batch {batch}, {budget.nodes} nodes, {name[:3]}"
            axes.plot(sizes, [r[name] for r in rows], style, label=label)
    axes.set_ylim(bottom=4)  # room for the legend
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(loc="lower left", ncols=2, fontsize="small")
    figure.savefig(path, dpi=150)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--millions", type=float, nargs="+", default=[8.0], help="tokens of the prior")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    vocab_size = tokenizer.get_vocab_size()
    sizes = sorted(int(millions * MILLION) for millions in given.millions)
    load = split(source_documents(tokenizer, sizes[-1] + LIVE_TOKENS + REPLAYED_TOKENS))
    records = []
    for size in track(sizes, "measuring", console=Console(stderr=True)):
        records += measure(load, size, vocab_size)
    show(records)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(
            json.dumps(
                {"manifest": manifest("engine", [], **vars(given)), "records": records}, default=str, indent=1
            )
        )
    if given.png:
        plot(records, given.png)


if __name__ == "__main__":
    main()
