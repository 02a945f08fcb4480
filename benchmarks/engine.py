"""`python -m benchmarks.engine`: time of a draft by the size of the prior, on real tokens, in one thread.

Python sources stand in the prior; other files, as if a model had just written them, stand in the live tier; further
files are replayed as sessions, a step at a time, each step adding what the draft got right and one token more. What is
timed is `Engine.step`, Python included: the call that the plugin and the service make.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from benchmarks.options import Parser, add_tokenizer
from benchmarks.playback import Playback
from benchmarks.report.records import finish
from benchmarks.sources import source_documents
from datastore_service.engine.engine import Engine
from datastore_service.engine.segment import Segment, build_segment
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


def publish(engine: Engine, documents: Sequence[np.ndarray]) -> None:
    """The documents as outputs of closed sessions, found from the live tier's fresh text and segments."""
    for i, document in enumerate(documents):
        engine.step([Entry(f"live{i}", 0, document, opening=Opening(publish=True), closing=True)])
    engine.settle()


def sessions(texts: Sequence[np.ndarray]) -> list[Playback]:
    """Unpublished, so that a later replay finds the same tiers."""
    return [Playback(str(i), text, PROMPT, Opening(publish=False)) for i, text in enumerate(texts)]


def replay(
    engine: Engine, documents: Sequence[np.ndarray], batch: int, budget: Budget
) -> tuple[list[int], int, int]:
    """Nanoseconds of each step, tokens they added, sessions' steps taken. The prompts are sent before, as a worker does while
    it prefills."""
    nanoseconds, tokens, steps = [], 0, 0
    long = [document for document in documents if len(document) >= PROMPT + 4 * STEPS]
    for first in range(0, len(long) - batch + 1, batch):
        playing = sessions(long[first : first + batch])
        engine.step([session.entry() for session in playing])
        for session in playing:
            session.advance(1)
        for _ in range(STEPS):
            entries = [session.entry(budget) for session in playing]
            started = time.perf_counter_ns()
            replies = engine.step(entries)
            nanoseconds.append(time.perf_counter_ns() - started)
            tokens += sum(session.follow(reply.tree) for session, reply in zip(playing, replies, strict=True))
            steps += batch
            if any(session.ended for session in playing):
                break
        engine.step([session.closing() for session in playing])
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
        sizes = {
            "prior_tokens": len(prior),
            "prior_bytes": prior.nbytes,
            "build_seconds": built,
            "batch": batch,
        }
        times = {"steps": len(nanoseconds), "p10_us": low, "p50_us": middle, "p99_us": high}
        records.append({**sizes, "nodes": budget.nodes, **times, "tokens_per_step": tokens / steps})
    return records


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("engine", __doc__)
    add_tokenizer(parser)
    parser.add("--millions", [8.0], "million tokens of the prior")
    given = parser.parse_args(argv)
    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    sizes = sorted(int(millions * MILLION) for millions in given.millions)
    load = split(source_documents(tokenizer, sizes[-1] + LIVE_TOKENS + REPLAYED_TOKENS))
    records = []
    for size in track(sizes, "measuring", console=Console(stderr=True)):
        records += measure(load, size, tokenizer.get_vocab_size())
    finish("engine", given, results=records)


if __name__ == "__main__":
    main()
