"""`python -m benchmarks.upkeep`: time and memory of building, merging, sessions and backups, the datastore's work beside queries.

Build: `build_segment` against pydivsufsort's raw time on the same tokens, in turns. Merging: the same replay with the
live tier at rest and while another thread adds text without pause, so that segments are sorted and merged all the
time. Sessions: bytes per token while open, and the process's resident size as thousands are opened and closed. Backup: a live tier written to a folder, once more after one output, restored, and opened as a start does. Encryption: what logs and segments take with a key, as ratios to
what they take without, in turns.
"""

from __future__ import annotations

import functools
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from pydivsufsort import divsufsort
from tokenizers import Tokenizer

from benchmarks.engine import MILLION, REPLAYED_TOKENS, prior_of, replay, split
from benchmarks.options import Parser, add_tokenizer
from benchmarks.playback import Playback
from benchmarks.report.records import finish
from benchmarks.sources import source_documents
from datastore_service.engine.engine import Engine
from datastore_service.engine.limits import Limits
from datastore_service.engine.provenance import provenance_of
from datastore_service.engine.segment import Segment, build_segment
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Namespace, Opening
from datastore_service.storage.backup import back_up
from datastore_service.storage.backup_store import BackupStore
from datastore_service.storage.data_directory import DataDirectory
from datastore_service.storage.encryption_keys import SECRET_BYTES, UNENCRYPTED, OperatorKeys, TextKeys
from datastore_service.storage.log import LogWriter, read_log
from datastore_service.storage.restore import restore
from datastore_service.storage.segment_file import open_verified, write_segment

BUILDS = 3
TURNS = 9
SESSIONS = 20_000
SESSION_TOKENS = 600
OPEN_AT_ONCE = 200
STEP_TOKENS = 3
WARM_UPS = 8  # into which the live documents are divided
NAMESPACE = Namespace("benchmark", "0" * 64)
WORKING_LIVE_TOKENS = 2 * MILLION  # small, so that eviction is at work too


def measure_build(documents: Sequence[np.ndarray], vocab_size: int) -> dict:
    """Seconds of the raw sort and of the whole build, and their ratio's spread over BUILDS turns."""
    segment = build_segment(documents, vocab_size)
    raw, whole = [], []
    for _ in range(BUILDS):
        started = time.perf_counter()
        divsufsort(segment.tokens)
        raw.append(time.perf_counter() - started)
        started = time.perf_counter()
        build_segment(documents, vocab_size, threads=os.cpu_count() or 1)  # as divsufsort does
        whole.append(time.perf_counter() - started)
    ratios = [b / a for a, b in zip(raw, whole, strict=True)]
    return {
        "tokens": len(segment), "bytes_per_token": segment.nbytes / len(segment), "raw_seconds": float(np.median(raw)),
        "build_seconds": float(np.median(whole)), "ratio": float(np.median(ratios)), "ratios": ratios,
    }  # fmt: skip


def measure_backup(documents: Sequence[np.ndarray], vocab_size: int) -> dict:
    """Seconds and bytes of a backup to an empty folder, of one more after an output, of its restore, and of a start with that."""
    with tempfile.TemporaryDirectory() as folder:
        source, target, copy = (Path(folder) / name for name in ("data", "store", "copy"))
        source.mkdir()
        engine = _stored(source, vocab_size)
        for part in (documents[first::WARM_UPS] for first in range(WARM_UPS)):
            engine.warmup(part)
        engine.settle()
        store = BackupStore(str(target))
        first, first_seconds = _timed(lambda: back_up(source, store))
        engine.step([Playback("one", documents[0], 1, Opening()).closing()])
        second, second_seconds = _timed(lambda: back_up(source, store))
        _, restore_seconds = _timed(lambda: restore(store, second.backup, copy))
        started, start_seconds = _timed(lambda: _stored(copy, vocab_size))
        tokens = started.stats().tiers[Tier.LIVE].tokens
        engine.close()
        started.close()
        return {
            "tokens": tokens, "bytes": first.new, "backup_seconds": first_seconds,
            "second_bytes": second.new, "second_seconds": second_seconds, "restore_seconds": restore_seconds,
            "start_seconds": start_seconds,
        }  # fmt: skip


def measure_encryption(documents: Sequence[np.ndarray], vocab_size: int) -> dict:
    """Ratios of the processor time that files take with a key to the time without: median, lowest and highest of TURNS turns."""
    segment = build_segment(documents, vocab_size)
    encrypting = OperatorKeys({"key": bytes(range(SECRET_BYTES))}).of(NAMESPACE)
    seconds: dict[str, list[list[float]]] = {}
    for turn in range(TURNS):
        both = [(keys, {}) for keys in (UNENCRYPTED, encrypting)]
        for keys, spent in both if turn % 2 else reversed(both):
            spent |= _file_seconds(documents, segment, keys)
        for name in both[0][1]:
            seconds.setdefault(name, []).append([spent[name] for _, spent in both])
    ratios = {name: np.array([b / a for a, b in pairs]) for name, pairs in seconds.items()}
    return {
        name: {"ratio": float(np.median(r)), "from": float(r.min()), "to": float(r.max()), "seconds": seconds[name]}
        for name, r in ratios.items()
    }  # fmt: skip


def _file_seconds(documents: Sequence[np.ndarray], segment: Segment, keys: TextKeys) -> dict[str, float]:
    """Processor seconds to append the documents to a log and to read it, to write the segment, and to open it as a start does."""
    names = NAMESPACE.tokenizer, segment.vocab_size
    provenance = provenance_of(Opening(), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        log, path = Path(folder, "00000001.log"), Path(folder, "00000001.seg")
        writer = LogWriter(log, *names, keys)
        seconds = {
            "append": _worked(lambda: [writer.append(document, provenance) for document in documents]),
            "read": _worked(lambda: read_log(log, *names, keys)),
            "write": _worked(lambda: write_segment(path, segment, NAMESPACE.tokenizer, keys)),
            "open": _worked(lambda: open_verified(path, *names, keys)),
        }
        writer.close()
    return seconds


def _worked(call: Callable[[], Any]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def _stored(root: Path, vocab_size: int) -> Engine:
    """An engine whose live tier is in a data directory, larger than any that is measured."""
    store = DataDirectory(root, vocab_size).open(NAMESPACE)
    return Engine(vocab_size, limits=Limits(live_tokens=1000 * MILLION), store=store)


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    return call(), time.perf_counter() - started


def measure_merging(
    prior: Sequence[np.ndarray], live: Sequence[np.ndarray], replayed: Sequence[np.ndarray], vocab_size: int
) -> dict:
    """Percentiles of a batch-1 step, µs, in turns: at rest; beside a thread that only sorts numbers, which has no lock and
    nothing to do with the engine, but takes the other core; beside one that keeps the live tier merging."""
    engine = Engine(
        vocab_size, [prior_of(prior, MILLION, vocab_size)], limits=Limits(live_tokens=WORKING_LIVE_TOKENS)
    )
    budget = Budget(nodes=16)
    replay(engine, replayed, 1, budget)
    beside = {"quiet": None, "busy": _sort_until, "merging": functools.partial(_merge_until, engine, live)}
    times: dict[str, list[int]] = {name: [] for name in beside}
    for _ in range(3):
        for name, task in beside.items():
            engine.settle()
            with _running(task):
                times[name] += replay(engine, replayed, 1, budget)[0]
    result: dict = {"live_segments": engine.stats().tiers[Tier.LIVE].segments}
    for name, nanoseconds in times.items():
        result[name] = dict(
            zip(("p50", "p99"), np.percentile(np.array(nanoseconds) / 1e3, (50, 99)), strict=True)
        )
    return result


@contextmanager
def _running(task: Callable[[threading.Event], None] | None) -> Iterator[None]:
    """The task on a thread of its own until the block ends."""
    stop = threading.Event()
    thread = threading.Thread(target=task or threading.Event.is_set, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _sort_until(stop: threading.Event) -> None:
    numbers = np.random.default_rng(0).random(1 << 18)
    while not stop.is_set():
        np.sort(numbers)


def _merge_until(engine: Engine, documents: Sequence[np.ndarray], stop: threading.Event) -> None:
    """Sorts, merges and evicts without pause."""
    parts = [documents[first::WARM_UPS] for first in range(WARM_UPS)]
    while not stop.is_set():
        for part in parts:
            engine.warmup(part)


def measure_sessions(text: np.ndarray, vocab_size: int) -> dict:
    """Opens and closes SESSIONS sessions of SESSION_TOKENS tokens; the resident size after each tenth of them."""
    engine = Engine(vocab_size, limits=Limits(live_tokens=0))
    process, resident, bytes_a_token = psutil.Process(), [], 0.0
    for first in range(0, SESSIONS, OPEN_AT_ONCE):
        names = [str(first + i) for i in range(OPEN_AT_ONCE)]
        playing = _filled(engine, names, text)
        infos = engine.sessions()
        bytes_a_token = sum(info.nbytes for info in infos) / sum(info.tokens for info in infos)
        engine.step([session.closing() for session in playing])
        if (first + OPEN_AT_ONCE) % (SESSIONS // 10) == 0:
            gc.collect()
            resident.append(process.memory_info().rss)
    return {"sessions": SESSIONS, "bytes_per_token": bytes_a_token, "resident_bytes": resident}


def _filled(engine: Engine, names: Sequence[str], text: np.ndarray) -> list[Playback]:
    """Sessions that have sent all of their text but the last step: a prompt and then a few tokens per step, as decoding does."""
    starts = np.random.default_rng(len(names)).integers(0, len(text) - SESSION_TOKENS, len(names))
    playing = [
        Playback(name, text[at : at + SESSION_TOKENS], SESSION_TOKENS // 2, Opening(publish=False))
        for name, at in zip(names, starts, strict=True)
    ]
    while not playing[0].ended:
        engine.step([session.entry() for session in playing])
        for session in playing:
            session.advance(STEP_TOKENS)
    return playing


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("upkeep", __doc__)
    add_tokenizer(parser)
    parser.add("--millions", 8.0, "million tokens of the build")
    given = parser.parse_args(argv)
    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    vocab_size = tokenizer.get_vocab_size()
    load = split(source_documents(tokenizer, int(given.millions * MILLION) + 2 * REPLAYED_TOKENS))
    finish(
        "upkeep",
        given,
        sessions=measure_sessions(np.concatenate(load.replayed), vocab_size),
        backup=measure_backup(load.prior, vocab_size),
        encryption=measure_encryption(load.prior, vocab_size),
        merging=measure_merging(load.prior, load.live, load.replayed, vocab_size),
        build=measure_build(load.prior, vocab_size),
    )


if __name__ == "__main__":
    main()
