"""One load: requests that start together, timed between two numbers of tokens of the fastest.

Answers are cut there: what the slower requests still have to say measures an emptying batch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import requests

from sglang_patches.launch.processes import PROXIES
from tests.support.servers.engine import SglangServer, StreamFailedError

ABORT_SECONDS = 60.0
# No answer may end by itself: its last step is sent as soon as it is known, every other one when the next forward is under way, and
# a part that ends with a last step is timed too short by a step.
BEYOND = 64


@dataclass(frozen=True)
class Course:
    """times: when each chunk of an answer came, a chunk a step. counts: its tokens until then. tokens: the answer. asked: when the
    request was sent."""

    times: list[float]
    counts: list[int]
    tokens: list[int]
    asked: float = 0.0


def window(courses: Sequence[Course], warm: int, until: int) -> dict:
    """The timed part: from when all answers have begun and one has `warm` tokens, until one has `until`.

    seconds, tokens: of all answers in it. steps: of single requests in it. Raises ValueError where no time is left between."""
    begin = max(min(_when(course, warm) for course in courses), *(_when(course, 1) for course in courses))
    end = min(_when(course, until) for course in courses)
    if end <= begin:
        raise ValueError(f"one answer has {until} tokens before all have begun")

    def within(counts: Sequence[Sequence[float]]) -> float:
        return sum(
            float(np.diff(np.interp([begin, end], course.times, of))[0])
            for course, of in zip(courses, counts, strict=True)
        )

    return {
        "seconds": end - begin,
        "tokens": within([course.counts for course in courses]),
        "steps": within([range(len(course.counts)) for course in courses]),
    }


def _when(course: Course, tokens: int) -> float:
    """When the answer had so many; a chunk's tokens come together."""
    return next(
        (at for at, count in zip(course.times, course.counts, strict=True) if count >= tokens), float("inf")
    )


def decode(
    server: SglangServer, prompts: Sequence[Sequence[int]], until: int, temperature: float = 0.0
) -> list[Course]:
    """Answers of all prompts at once, cut when one has `until` tokens. Raises requests.HTTPError."""
    done = threading.Event()

    def answer(prompt: Sequence[int]) -> Course:
        times, counts, tokens = [], [], []
        asked = time.perf_counter()
        with contextlib.closing(_stream(server, prompt, until, temperature, done)) as events:
            for event in events:
                times.append(time.perf_counter())
                tokens = event["output_ids"]
                counts.append(len(tokens))
                if len(tokens) >= until and not done.is_set():
                    done.set()
                    _abort_all(server)
        return Course(times, counts, tokens, asked)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(answer, prompts))


def _stream(
    server: SglangServer, prompt: Sequence[int], until: int, temperature: float, done: threading.Event
):
    # A step may emit more than is asked for, and the others go on until they are told.
    sampling = {"temperature": temperature, "max_new_tokens": until + BEYOND, "ignore_eos": True}
    try:
        yield from server.stream(prompt, stream_interval=1, **sampling)
    except StreamFailedError:
        if not done.is_set():
            raise


def _abort_all(server: SglangServer) -> None:
    body = {"rid": "", "abort_all": True}
    answer = requests.post(server.url + "/abort_request", json=body, proxies=PROXIES, timeout=ABORT_SECONDS)
    answer.raise_for_status()
