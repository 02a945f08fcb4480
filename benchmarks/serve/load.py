"""A steady load on one server: as one answer ends the next prompt is sent, so that the batch stays full.

Requests that start together end apart wherever drafts are accepted unevenly, and a batch that drains measures its
slowest request. So the timed part ends when there is no prompt left to send: until then every place was taken, and
what all places have produced by then counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from tests.support.servers.engine import SglangServer


@dataclass(frozen=True)
class Answer:
    """times: when the request was sent and each chunk came. counts: tokens known at those times. steps: decode steps the
    answer took."""

    tokens: list[int]
    times: list[float]
    counts: list[int]
    steps: int

    def count_at(self, when: float) -> float:
        return float(np.interp(when, self.times, self.counts, left=0))

    def gaps(self) -> list[float]:
        """Seconds between tokens after the first: a chunk of several tokens counts as so many equal gaps, as
        sglang.bench_serving counts them."""
        return [
            (self.times[i] - self.times[i - 1]) / new
            for i in range(2, len(self.times))
            for new in [self.counts[i] - self.counts[i - 1]]
            for _ in range(new)
        ]


@dataclass(frozen=True)
class Load:
    """seconds: the timed part. produced: tokens in it."""

    answers: list[Answer]
    seconds: float
    produced: float


def prompts_for(batch: int) -> int:
    """Prompts of one load: each place but the last is taken a second time."""
    return 2 * batch - 1


def steady_load(
    server: SglangServer, prompts: Sequence[Sequence[int]], batch: int, **sampling: object
) -> Load:
    """Answers in the order of the prompts; raises requests.HTTPError."""
    waiting = iter(range(len(prompts)))
    lock = threading.Lock()
    answers: dict[int, Answer] = {}
    ended: list[float] = []

    def keep_place_taken() -> None:
        while True:
            with lock:
                place = next(waiting, None)
                if place is None:
                    ended.append(time.perf_counter())
                    return
            answers[place] = _answer(server, prompts[place], sampling)

    started = time.perf_counter()
    with ThreadPoolExecutor(batch) as pool:
        for finished in [pool.submit(keep_place_taken) for _ in range(batch)]:
            finished.result()
    in_order = [answers[place] for place in range(len(prompts))]
    return Load(in_order, min(ended) - started, sum(answer.count_at(min(ended)) for answer in in_order))


def _answer(server: SglangServer, prompt: Sequence[int], sampling: dict[str, object]) -> Answer:
    times, counts = [time.perf_counter()], [0]
    last: dict = {}
    for last in server.stream(prompt, **sampling):
        times.append(time.perf_counter())
        counts.append(len(last["output_ids"]))
    return Answer(
        last["output_ids"], times, counts, last["meta_info"].get("spec_verify_ct") or counts[-1] - 1
    )
