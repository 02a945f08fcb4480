"""What is measured of the servers: one load after the other, each variant on the same prompts (`benchmarks.beside`)."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.beside.costs import DraftTimes, TargetTimes, Watch
from benchmarks.beside.forecast import Forecaster, with_first_token
from benchmarks.beside.servers import ALGORITHMS, BESIDE, KV_TOKENS, Setup, all_running, rotated, say
from benchmarks.beside.tables import FORECASTS
from benchmarks.beside.window import Course, decode, window
from benchmarks.emulated_latency import AdjustableLatency
from benchmarks.pipeline.methods import policy_of
from benchmarks.pipeline.pairs import Pair
from benchmarks.pipeline.simulation import EarlyExit
from benchmarks.replay.methods import Corpus
from benchmarks.report.records import JOURNAL, Journal, finish, manifest
from benchmarks.serve.variants import prepare
from sglang_patches.options import Options
from tests.support.servers.engine import SglangServer, exit_when_terminated

DELAY = 0.5e-3  # seconds of a message between the processes: both wake up for it
PLAIN_WARM = 2  # tokens: plain decoding has nothing to warm up for
PILOT_MS = 500.0  # emulated: the draft process is busy all the time
REAL = 0.0  # in place of a speed ratio
FIRST = ("plain", "sssd")  # measured before the forecasts are made


@dataclass(frozen=True)
class Servers:
    """The servers that run, and how a load on them is timed. running: by variant. latency: None where the target's own is measured."""

    given: argparse.Namespace
    running: dict[str, SglangServer]
    latency: AdjustableLatency | None
    journal: Journal

    def emulate(self, milliseconds: float) -> None:
        if self.latency is not None:
            self.latency.set(milliseconds)

    def part(self, variant: str) -> tuple[int, int]:
        """The timed tokens of the answer that is ahead: from where, and until where."""
        if variant == "plain":
            return PLAIN_WARM, PLAIN_WARM + self.given.plain_tokens
        return self.given.warm, self.given.warm + self.given.tokens

    def answered(
        self, variant: str, prompts: Sequence[Sequence[int]], until: int, temperature: float = 0.0
    ) -> tuple[list[Course], dict]:
        """The answers, cut when one has `until` tokens, and what they added to the server's counters."""
        watch = Watch(variant, self.running[variant])
        courses = decode(self.running[variant], prompts, until, temperature)
        return courses, watch.added()

    def in_time(self) -> Callable[[], bool]:
        """Says from now on whether another group may be begun."""
        until = time.monotonic() + 60 * self.given.minutes

        def is_left() -> bool:
            left = time.monotonic() <= until
            if not left:
                say("the time is up")
            return left

        return is_left


@contextlib.contextmanager
def measured(
    command: str,
    given: argparse.Namespace,
    files: Sequence[Path],
    summarise: Callable[[Path], dict],
    dtype: str,
    length: str,
    emulated: bool = True,
    answers: Callable[[Path], list[Path]] = lambda folder: [],
    tokens: int = KV_TOKENS,
) -> Iterator[Servers]:
    """Servers that run, and when they have been measured the record, also of a run that breaks off. answers: writes files of more
    recorded answers for the prior into a folder."""
    exit_when_terminated()
    path = given.json.with_suffix(JOURNAL)
    journal = Journal(path, manifest(command, files, given))
    with tempfile.TemporaryDirectory(prefix="bench-beside-") as name:
        folder = Path(name)
        latency = AdjustableLatency(folder / "latency") if emulated else None
        knowledge = prepare((), [*given.prior, *answers(folder)], given.model / "tokenizer.json", folder)
        environment = latency.environment() if latency else {}
        setup = Setup(given, dtype, knowledge.prior, length, environment, tokens)
        try:
            with all_running(given.variants, setup, folder) as servers:
                yield Servers(given, servers, latency, journal)
        finally:
            finish(command, given, files, **summarise(path))


def forecast_options(given: argparse.Namespace, length: str) -> Options:
    """The servers' options, as far as the simulator has what they set."""
    sizes = {"draft_rows": given.rows, "draft_lookahead": given.nodes, "draft_phrase": given.phrase}
    return Options(nodes=given.nodes, length=length, publish="off", **sizes)


class Run:
    """Groups of prompts on all servers, with a forecast of each method before it is measured."""

    def __init__(
        self, servers: Servers, pairs: Sequence[Pair], corpus: Corpus, length: str, exit: EarlyExit | None
    ) -> None:
        self._servers, self._given, self._corpus, self._exit = servers, servers.given, corpus, exit
        self._pairs, self._options = [*map(with_first_token, pairs)], forecast_options(servers.given, length)
        self._ours = [variant for variant in BESIDE if variant in servers.running]
        self._draft, self._target = {variant: DraftTimes() for variant in self._ours}, TargetTimes()
        self._step_seconds = 0.0  # of SSSD's newest load
        self._full_forward_ms = 0.0  # of the draft model: the unit of the speed ratios
        self._forecasters: dict[str, Forecaster] = {}

    def warm_up(self) -> None:
        """Every prompt once, so that its KV is in each server's prefix cache; then a load at each batch size, from which the draft
        processes' times are known."""
        prompts = [pair.prompt[:-1].tolist() for pair in self._pairs]
        for variant, server in self._servers.running.items():
            server.generate_many(prompts, max(self._given.batch), temperature=0, max_new_tokens=2)
            say(f"{variant} has seen all prompts")
        self._servers.emulate(PILOT_MS)
        for batch in sorted(self._given.batch):
            for variant in ("sssd", *self._ours):
                record = self._measure(variant, self._group(batch, 0), 2, 2 + self._given.warm)
                self._servers.journal.add("pilot", {"variant": variant, "batch": batch} | record)
        for variant, times in reversed(self._draft.items()):  # the first one's is the unit
            self._full_forward_ms = 1e3 * times.forward(self._given.rows)
            points = ", ".join(f"{rows:.1f} rows {1e3 * s:.0f} ms" for rows, s in times.points())
            prefill = f"prefill {1e3 * times.prefill(100):.0f} ms for 100 tokens"
            around = f"{1e3 * times.around_forward:.1f} ms around each"
            say(f"draft forwards of {variant}: {points}; {prefill}; {around}")

    def measure_all(self) -> None:
        """Measures in rounds of a group of every batch size and ratio, so that a run that is cut off has all of them."""
        given, in_time = self._given, self._servers.in_time()
        places = itertools.product(range(given.groups), given.batch, given.speed or [REAL])
        for turn, (group, batch, speed) in enumerate(places):
            if not in_time():
                return
            self._point(speed, batch, group, turn)

    def _point(self, speed: float, batch: int, group: int, turn: int) -> None:
        """One group on all servers. A forecast is made once plain decoding and SSSD are measured, before the method is."""
        milliseconds = speed * self._full_forward_ms
        self._servers.emulate(milliseconds)
        labels, chosen, said = {"speed": speed, "batch": batch, "group": group}, self._group(batch, group), []
        forecast = {FORECASTS[variant]: variant for variant in self._ours}
        for variant in (*rotated(FIRST, turn), *forecast, *rotated((*BESIDE, "standalone"), turn)):
            if variant in forecast:
                record = self._forecast(forecast[variant], chosen)
            elif variant in self._servers.running:
                record = self._measure(variant, chosen, *self._servers.part(variant))
            else:
                continue
            record |= {"emulated_ms": milliseconds if self._servers.latency else None}
            self._servers.journal.add("group", labels | {"variant": variant} | record)
            said.append(f"{variant} {record['tokens'] / record['seconds']:.1f}")
        say(f"speed {speed:g}, batch {batch}, group {group}: {', '.join(said)} tokens/s")

    def _measure(self, variant: str, group: Sequence[Pair], warm: int, until: int) -> dict:
        prompts = [pair.prompt[:-1].tolist() for pair in group]
        courses, added = self._servers.answered(variant, prompts, until)
        timed = window(courses, warm, until) | added
        if variant == "sssd":
            self._target.learn(timed["cells"])
            self._step_seconds = timed["seconds"] * len(group) / timed["steps"]
        if variant in self._draft:
            self._draft[variant].learn(timed["draft"])
        same = [_agreement(course.tokens, pair) for course, pair in zip(courses, group, strict=True)]
        return timed | {"as_recorded": same}

    def _forecast(self, variant: str, group: Sequence[Pair]) -> dict:
        batch = len(group)
        own = self._target.of(batch)

        def target(rows: float) -> float:
            return self._step_seconds if self._servers.latency else own(rows / batch, 0.0)

        if variant not in self._forecasters:
            policy = policy_of(self._options.length, self._options.nodes, target)
            known = (ALGORITHMS[variant], self._options, self._corpus, policy, group[0], DELAY)
            exit = self._exit if variant == "mirror" else None
            self._forecasters[variant] = Forecaster(*known, exit=exit)
        part = self._servers.part(variant)
        return self._forecasters[variant].load(group, target, self._draft[variant], *part)

    def _group(self, batch: int, group: int) -> list[Pair]:
        """The same prompts at every batch size, as far as they reach."""
        begin = group * max(self._given.batch) % len(self._pairs)
        return self._pairs[begin : begin + batch]


def _agreement(tokens: Sequence[int], pair: Pair) -> int:
    """How many leading tokens of an answer are the recorded ones."""
    recorded = [pair.prompt[-1], *pair.tokens]
    return next((at for at, (a, b) in enumerate(zip(tokens, recorded, strict=False)) if a != b), len(tokens))
