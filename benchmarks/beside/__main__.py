"""`python -m benchmarks.beside`: drafting beside the target against plain decoding, SSSD, STANDALONE and the simulator's forecasts.

With --speed the target's latency is EMULATED, by a sleep inside its forwards (benchmarks.emulated_latency): so many times a full
draft forward. Without it, what is measured is what the processor computes, in the type that suits it. Each process has one core.
Prompts come from a file of pairs (benchmarks.beside.models), which also says what the two models say.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.beside.costs import DraftTimes, TargetTimes, Watch
from benchmarks.beside.forecast import Forecaster, with_first_token
from benchmarks.beside.servers import ALGORITHMS, BESIDE, VARIANTS, Setup, all_running, rotated, say
from benchmarks.beside.summary import records_of, summarise
from benchmarks.beside.window import decode, window
from benchmarks.emulated_latency import AdjustableLatency
from benchmarks.options import check_positive, options
from benchmarks.pipeline.exits import middle
from benchmarks.pipeline.methods import policy_of
from benchmarks.pipeline.pairs import Pair, load
from benchmarks.pipeline.simulation import EarlyExit
from benchmarks.replay.methods import Corpus
from benchmarks.report.beside import FORECASTS
from benchmarks.report.manifest import manifest
from benchmarks.report.records import finish
from benchmarks.serve.journal import SUFFIX, Journal
from benchmarks.serve.variants import prepare
from benchmarks.traces import SHIPPED_PRIOR, load_traces
from sglang_patches.launch.serve import suitable_dtype
from sglang_patches.options import Options
from tests.support.servers.engine import DEVICE, SglangServer, exit_when_terminated

DELAY = 0.5e-3  # seconds of a message between the processes: both wake up for it
PLAIN_WARM = 2  # tokens: plain decoding has nothing to warm up for
PILOT_MS = 500.0  # emulated: the draft process is busy all the time
REAL = 0.0  # in place of a speed ratio
FIRST = ("plain", "plain_two", "sssd")  # measured before the forecasts are made


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options("beside", __doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the target")
    add("--draft", type=Path, required=True)
    add("--early-exit", type=Path, help="file of the target's early exits, for mirror")
    add("--pairs", type=Path, required=True, help="of python -m benchmarks.beside.models")
    add("--prior", type=Path, nargs="+", default=[SHIPPED_PRIOR], help="recorded answers the datastore knows")
    add(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=["plain", "sssd", "saguaro", "double"],
        help="the demo model's take about 4 GiB each",
    )
    add("--speed", type=float, nargs="+", default=[], help="EMULATED target step over a full draft forward")
    add("--batch", type=int, nargs="+", default=[1, 4, 8])
    add("--groups", type=int, default=3, help="of prompts, for each batch size")
    add("--nodes", type=int, default=4, help="K: drafted tokens a step, and after each guess")
    add("--rows", type=int, default=24, help="of a draft forward")
    add("--phrase", type=int, default=Options().draft_phrase, help="retrieved tokens of one, at most")
    add("--warm", type=int, default=8, help="tokens of each answer before the timed part")
    add("--tokens", type=int, default=24, help="of the first answer that ends the timed part, after those")
    add("--plain-tokens", type=int, default=8, help="the same for plain decoding, whose steps all yield one")
    add("--minutes", type=float, default=600.0, help="after which no group is begun")
    parser.set_defaults(json=Path("var/beside.json"))
    given = parser.parse_args(argv)
    check_positive(
        parser, given, "batch", "groups", "nodes", "rows", "warm", "tokens", "plain_tokens", "minutes"
    )
    for name in ("plain", "sssd"):
        if name not in given.variants:
            parser.error(f"--variants: the others are compared with {name}")
    if "mirror" in given.variants and given.early_exit is None:
        parser.error("--early-exit: mirror needs the file")
    if given.speed and not set(BESIDE) & set(given.variants):
        parser.error(
            f"--speed: none of {', '.join(BESIDE)} is there, of whose draft forwards it is a multiple"
        )
    return given


def length_of(given: argparse.Namespace) -> str:
    """The servers' --specstore-length: an emulated step takes as long whatever is verified."""
    return "static" if given.speed else "adaptive"


def forecast_options(given: argparse.Namespace) -> Options:
    """The servers' options, as far as the simulator has what they set."""
    return Options(
        nodes=given.nodes,
        length=length_of(given),
        draft_rows=given.rows,
        draft_lookahead=given.nodes,
        draft_phrase=given.phrase,
        publish="off",
    )


class Run:
    """servers: by variant. latency: None where the target's own is measured."""

    def __init__(
        self,
        given: argparse.Namespace,
        servers: dict[str, SglangServer],
        latency: AdjustableLatency | None,
        pairs: Sequence[Pair],
        corpus: Corpus,
        journal: Journal,
        exit: EarlyExit | None,
    ) -> None:
        self._given, self._servers, self._latency, self._journal = given, servers, latency, journal
        self._pairs, self._corpus = [with_first_token(pair) for pair in pairs], corpus
        self._ours = [variant for variant in BESIDE if variant in servers]
        self._draft, self._target = {variant: DraftTimes() for variant in self._ours}, TargetTimes()
        self._step_seconds = 0.0  # of SSSD's newest load
        self._full_forward_ms = 0.0  # of the draft model: the unit of the speed ratios
        self._exit, self._forecasters = exit, dict[str, Forecaster]()

    def warm_up(self) -> None:
        """Every prompt once, so that its KV is in each server's prefix cache; then a load at each batch size, from which the draft
        processes' times are known."""
        prompts = [pair.prompt[:-1].tolist() for pair in self._pairs]
        for variant, server in self._servers.items():
            server.generate_many(prompts, max(self._given.batch), temperature=0, max_new_tokens=2)
            say(f"{variant} has seen all prompts")
        self._emulate(PILOT_MS)
        for batch in sorted(self._given.batch):
            for variant in ("sssd", *self._ours):
                record = self._measure(variant, self._group(batch, 0), 2, 2 + self._given.warm)
                self._journal.add("pilot", {"variant": variant, "batch": batch} | record)
        for variant, times in reversed(self._draft.items()):  # the first one's is the unit
            self._full_forward_ms = 1e3 * times.forward(self._given.rows)
            points = ", ".join(f"{rows:.1f} rows {1e3 * s:.0f} ms" for rows, s in times.points())
            prefill = f"prefill {1e3 * times.prefill(100):.0f} ms for 100 tokens"
            say(
                f"draft forwards of {variant}: {points}; {prefill}; {1e3 * times.around_forward:.1f} ms around each"
            )

    def measure_all(self) -> None:
        """In rounds of a group of every batch size and ratio, so that a run that is cut off has all of them."""
        until = time.monotonic() + 60 * self._given.minutes
        turn = 0
        for group in range(self._given.groups):
            for batch in self._given.batch:
                for speed in self._given.speed or [REAL]:
                    if time.monotonic() > until:
                        say("the time is up")
                        return
                    self._point(speed, batch, group, turn)
                    turn += 1

    def _point(self, speed: float, batch: int, group: int, turn: int) -> None:
        """One group on all servers. A forecast is made once plain decoding and SSSD are measured, before the method is."""
        milliseconds = speed * self._full_forward_ms
        self._emulate(milliseconds)
        labels = {"speed": speed, "batch": batch, "group": group}
        chosen = self._group(batch, group)
        said = []
        forecast = {FORECASTS[variant]: variant for variant in self._ours}
        for variant in (*rotated(FIRST, turn), *forecast, *rotated((*BESIDE, "standalone"), turn)):
            if variant in forecast:
                record = self._forecast(forecast[variant], chosen)
            elif variant in self._servers:
                record = self._measure(variant, chosen, *self._part(variant))
            else:
                continue
            record |= {"emulated_ms": milliseconds if self._latency else None}
            self._journal.add("group", labels | {"variant": variant} | record)
            said.append(f"{variant} {record['tokens'] / record['seconds']:.1f}")
        say(f"speed {speed:g}, batch {batch}, group {group}: {', '.join(said)} tokens/s")

    def _part(self, variant: str) -> tuple[int, int]:
        """The timed tokens of the answer that is ahead: from where, and until where."""
        if variant.startswith("plain"):
            return PLAIN_WARM, PLAIN_WARM + self._given.plain_tokens
        return self._given.warm, self._given.warm + self._given.tokens

    def _measure(self, variant: str, group: Sequence[Pair], warm: int, until: int) -> dict:
        server = self._servers[variant]
        watch = Watch(variant, server)
        courses = decode(server, [pair.prompt[:-1].tolist() for pair in group], until)
        added = watch.added()
        timed = window(courses, warm, until)
        if variant == "sssd":
            self._target.learn(added["cells"])
            self._step_seconds = timed["seconds"] * len(group) / timed["steps"]
        if variant in self._draft:
            self._draft[variant].learn(added["draft"])
        same = [_agreement(course.tokens, pair) for course, pair in zip(courses, group, strict=True)]
        return timed | added | {"as_recorded": same}

    def _forecast(self, variant: str, group: Sequence[Pair]) -> dict:
        given, batch = self._given, len(group)
        measured = self._target.of(batch)

        def target(rows: float) -> float:
            return self._step_seconds if self._latency else measured(rows / batch, 0.0)

        if variant not in self._forecasters:
            options = forecast_options(given)
            policy = policy_of(options.length, given.nodes, target)
            self._forecasters[variant] = Forecaster(
                ALGORITHMS[variant],
                options,
                self._corpus,
                policy,
                group[0],
                DELAY,
                exit=self._exit if variant == "mirror" else None,
            )
        return self._forecasters[variant].load(group, target, self._draft[variant], *self._part(variant))

    def _group(self, batch: int, group: int) -> list[Pair]:
        """The same prompts at every batch size, as far as they reach."""
        largest = max(self._given.batch)
        begin = group * largest % len(self._pairs)
        return self._pairs[begin : begin + batch]

    def _emulate(self, milliseconds: float) -> None:
        if self._latency is not None:
            self._latency.set(milliseconds)


def _agreement(tokens: Sequence[int], pair: Pair) -> int:
    """How many leading tokens of an answer are the recorded ones."""
    recorded = [pair.prompt[-1], *pair.tokens]
    return next((at for at, (a, b) in enumerate(zip(tokens, recorded, strict=False)) if a != b), len(tokens))


def main(argv: Sequence[str] | None = None) -> None:
    from transformers import AutoTokenizer

    given = parse(argv)
    exit_when_terminated()
    pairs, what = load(given.pairs)
    if len(pairs) < given.groups * max(given.batch):
        sys.exit(f"--pairs: {len(pairs)} prompts, {given.groups * max(given.batch)} are needed")
    if "mirror" in given.variants and not pairs[0].exits:
        sys.exit("--pairs: without what the early exits expect; record them with --early-exit")
    exit = middle(pairs, int(what["layers"])) if pairs[0].exits else None
    corpus = Corpus(
        [trace.output for trace in load_traces(*given.prior)],
        vocab_size=len(AutoTokenizer.from_pretrained(given.model)),
    )
    files = [given.pairs, *given.prior]
    path = given.json.with_suffix(SUFFIX)
    journal = Journal(path, manifest("beside", files, given))
    with tempfile.TemporaryDirectory(prefix="bench-beside-") as name:
        folder = Path(name)
        latency = AdjustableLatency(folder / "latency") if given.speed else None
        knowledge = prepare((), given.prior, given.model / "tokenizer.json", folder)
        setup = Setup(
            given.model,
            given.draft,
            "float32" if latency else suitable_dtype(DEVICE),
            knowledge.prior,
            given.nodes,
            given.rows,
            given.phrase,
            length_of(given),
            max(given.batch),
            latency.environment() if latency else {},
            given.early_exit,
        )
        try:
            with all_running(given.variants, setup, folder) as servers:
                run = Run(given, servers, latency, pairs, corpus, journal, exit)
                run.warm_up()
                run.measure_all()
        finally:
            finish("beside", given, files, **summarise(records_of(path)))


if __name__ == "__main__":
    main()
