"""`python -m benchmarks.split_latency`: time between tokens while long prompts arrive, prefill and decode on one instance and on two.

Both stacks run all the time on this machine and take turns; the one that does not measure is stopped (SIGSTOP). A gap is
the time between two chunks of a streamed answer, one a decode step. Every instance has an embedded datastore.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import requests

from benchmarks.options import add_dtype, options
from benchmarks.report.records import finish
from sglang_patches.demo.model import ensure
from sglang_patches.launch.servers import Endpoint, ServerSpec, exit_when_terminated, running
from sglang_patches.launch.split import split

SHORT = 40  # tokens of a running request's prompt
VOCAB = (100, 40_000)  # ids that random prompts are made of: nothing of them is cached
ANSWER_SECONDS = 120.0
QUIET, BUSY = "quiet", "while long prompts arrive"


@dataclass
class Stack:
    """One stack. pids: of its processes' groups. gaps: seconds, by phase, one list a round. prefills: seconds that long
    prompts took to their first token."""

    name: str
    endpoint: Endpoint
    pids: list[int]
    gaps: dict[str, list[list[float]]] = field(default_factory=lambda: {QUIET: [], BUSY: []})
    prefills: list[float] = field(default_factory=list)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Returns when it answers: its parts may have missed each other."""
        self._signal(signal.SIGCONT)
        limit = time.monotonic() + ANSWER_SECONDS
        while True:
            try:
                self.endpoint.generate([VOCAB[0]], temperature=0, max_new_tokens=1)
                return
            except requests.RequestException:
                if time.monotonic() > limit:
                    raise
                time.sleep(0.5)

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            os.killpg(pid, number)


class Streams:
    """Requests that are decoded all the time; `gaps` between their chunks, each with when it ended."""

    def __init__(self, endpoint: Endpoint, count: int, rng: random.Random) -> None:
        self._endpoint, self._stopping = endpoint, threading.Event()
        self._gaps: list[tuple[float, float]] = []
        prompts = [prompt(SHORT, rng) for _ in range(count)]
        self._threads = [threading.Thread(target=self._follow, args=(p,)) for p in prompts]

    def _follow(self, ids: list[int]) -> None:
        sampling = {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True}
        last = None
        for _ in self._endpoint.stream(ids, **sampling):
            now = time.perf_counter()
            if last is not None:
                self._gaps.append((now, now - last))
            last = now
            if self._stopping.is_set():
                return

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        while len(self._gaps) < 8 * len(self._threads):
            if not all(thread.is_alive() for thread in self._threads):
                raise RuntimeError("a request that was to run has ended")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def during(self, action: Callable[[], None]) -> list[float]:
        """The gaps that ended while it ran."""
        begin = time.perf_counter()
        action()
        end = time.perf_counter()
        return [gap for when, gap in list(self._gaps) if begin < when < end]


def prompt(tokens: int, rng: random.Random) -> list[int]:
    return [rng.randrange(*VOCAB) for _ in range(tokens)]


def measure(stack: Stack, given: argparse.Namespace, rng: random.Random) -> None:
    """One round."""

    def long_prompts() -> None:
        with ThreadPoolExecutor(8) as pool:
            for _ in range(given.prompts):
                pool.submit(one_long_prompt)
                time.sleep(given.every)

    def one_long_prompt() -> None:
        begin = time.perf_counter()
        stack.endpoint.generate(prompt(given.long, rng), temperature=0, max_new_tokens=1)
        stack.prefills.append(time.perf_counter() - begin)

    with Streams(stack.endpoint, given.running, rng) as streams:
        stack.gaps[QUIET].append(streams.during(lambda: time.sleep(given.quiet)))
        stack.gaps[BUSY].append(streams.during(long_prompts))
    time.sleep(2.0)  # for what was aborted


def rows_of(stack: Stack) -> list[dict]:
    """One a phase: milliseconds of its gaps, a list a round, and the median wait for a long prompt's first token."""
    prefill = float(np.median(stack.prefills))
    return [
        {
            "stack": stack.name, "phase": phase, "long_prompt_p50_s": prefill,
            "gaps_ms": [[round(1e3 * gap, 1) for gap in gaps] for gaps in rounds],
        }
        for phase, rounds in stack.gaps.items()
    ]  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options("split_latency", __doc__)
    parser.add_argument("--model", type=Path, help="the demo model if left out")
    parser.add_argument("--rounds", type=int, default=4, help="of each stack, in turn")
    parser.add_argument("--running", type=int, default=2, help="requests that are decoded all the time")
    parser.add_argument("--long", type=int, default=1500, help="tokens of a long prompt")
    parser.add_argument("--prompts", type=int, default=5, help="long prompts a round")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two of them")
    parser.add_argument("--quiet", type=float, default=8.0, help="seconds without any, before them")
    add_dtype(parser)
    return parser.parse_args(argv)


def run(given: argparse.Namespace, folder: Path) -> list[Stack]:
    model = given.model or ensure()
    flags = ("--specstore-endpoint", "embedded", "--specstore-length", "static")
    environment = {"OMP_WAIT_POLICY": "PASSIVE"}
    one, two = (
        ServerSpec(name, model, "SSSD", dtype=given.dtype, nodes=3, flags=flags, environment=environment)
        for name in ("unsplit", "split")
    )
    with running(one, folder) as server:
        unsplit = Stack("unsplit", server, [server.pid])
        unsplit.pause()
        try:
            with split(two, folder) as instances:
                stacks = [unsplit, Stack("split", instances, instances.pids)]
                stacks[1].pause()
                try:
                    take_turns(stacks, given)
                finally:
                    stacks[1].resume()
        finally:
            unsplit.resume()
    return stacks


def take_turns(stacks: Sequence[Stack], given: argparse.Namespace) -> None:
    """The first round of each is thrown away."""
    rng = random.Random(0)
    for number in range(given.rounds + 1):
        for stack in stacks if number % 2 else reversed(stacks):
            stack.resume()
            measure(stack, given, rng)
            stack.pause()
            print(f"round {number} of {stack.name}: {len(stack.gaps[BUSY][-1])} gaps", file=sys.stderr)
        if number == 0:
            for stack in stacks:
                stack.gaps, stack.prefills = {QUIET: [], BUSY: []}, []


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    exit_when_terminated()
    with tempfile.TemporaryDirectory(prefix="split-latency-") as folder:
        stacks = run(given, Path(folder))
    finish("split_latency", given, results=[row for stack in stacks for row in rows_of(stack)])


if __name__ == "__main__":
    try:
        main()
    except requests.HTTPError as error:
        raise SystemExit(f"error: {error}") from None
