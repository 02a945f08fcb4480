"""What a method's index of a corpus costs: seconds to build and memory that stays. Each is built in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.replay.methods import METHODS, OURS, Corpus, available

MEASURED = (OURS, "SGLang trie + corpus", "SGLang trie, warmed", "suffix decoding")
WARM_UP_TOKENS = 2000  # built first: libraries are loaded and kernels compiled
NODES = 16


def footprint(
    documents: Sequence[np.ndarray], vocab_size: int, methods: Sequence[str] = MEASURED
) -> list[dict]:
    """One record a method that has an index of its own."""
    corpus = Corpus(documents, vocab_size=vocab_size)
    return [_in_a_process(name, corpus) for name in methods if name in available()]


def _in_a_process(name: str, corpus: Corpus) -> dict:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, name, corpus).result()


def _measure(name: str, corpus: Corpus) -> dict:
    small = Corpus([np.concatenate(corpus.documents)[:WARM_UP_TOKENS]], vocab_size=corpus.vocab_size)
    METHODS[name](small, NODES)
    before = _resident()
    started = time.perf_counter()
    method = METHODS[name](corpus, NODES)
    seconds = time.perf_counter() - started
    grown = _resident() - before
    del method
    sizes = {"tokens": corpus.tokens, "build_seconds": seconds, "bytes_per_token": grown / corpus.tokens}
    return {"method": name, **sizes}


def _resident() -> int:
    """Bytes of this process in memory, after what was freed has been given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
