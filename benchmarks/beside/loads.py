"""`python -m benchmarks.beside.loads`: every method under several kinds of load, at EMULATED speed ratios and batch sizes.

All servers run at once and meet the same prompts. A ratio says how many full draft forwards the target's decode or verify forward
takes at least, by a sleep inside it (benchmarks.emulated_latency). Loads are those of benchmarks.serve.cases; the answers of
`repeated` stand in the prior, as the live tier would hold them, because nothing is published (benchmarks.beside.servers). The first
time a prompt is asked, alone, gives its time to first token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.beside.costs import DraftTimes, Watch
from benchmarks.beside.load_summary import summarise
from benchmarks.beside.servers import ALGORITHMS, BESIDE, Setup, all_running, rotated, say
from benchmarks.beside.window import BEYOND, Course, decode, window
from benchmarks.emulated_latency import AdjustableLatency
from benchmarks.options import add_dtype, check_positive, options
from benchmarks.report.manifest import manifest
from benchmarks.report.records import finish
from benchmarks.serve.cases import CASES, SUMMARIZE, Pool, Request
from benchmarks.serve.journal import SUFFIX, Journal
from benchmarks.serve.variants import prepare
from benchmarks.traces import SHIPPED, SHIPPED_PRIOR, recorded_rows
from sglang_patches.ledger.usage import DRAFT_MODEL, source_name
from sglang_patches.reports.usage_report import SUMMARY
from tests.support.servers.engine import SglangServer, exit_when_terminated

LOADS = ("mixed", "repeated", "followup", "long", "unrelated")
LONG_TOKENS = 600  # of a long prompt, at most: each draft process prefills it anew
PLAIN_WARM = 2  # tokens: plain decoding has nothing to warm up for
PILOT_MS = 500.0  # emulated: the draft process is busy all the time
ANSWERS = 2  # of a load, ratio and batch size in a round, at least
SETTLING = 16  # tokens after a change of the ratio: step times are learned
# The same in the first round, whose answers show what each request has of the draft model: for half of 16 tokens that still reads the
# prompts of a batch of 32.
SHOWING = 96
MODEL = source_name(DRAFT_MODEL)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options("beside.loads", __doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="the target")
    add("--draft", type=Path, required=True)
    add("--early-exit", type=Path, help="file of the target's early exits, for mirror")
    add("--prompts", type=Path, nargs="+", default=[SHIPPED], help="files of python -m benchmarks.record")
    add("--prior", type=Path, nargs="+", default=[SHIPPED_PRIOR], help="recorded answers the datastore knows")
    add(
        "--variants",
        nargs="+",
        choices=("plain", *ALGORITHMS),
        default=["plain", "sssd", "saguaro", "double", "duo", "specstore"],
        help="the demo model's take 3 GiB each, with a draft process 4.5",
    )
    add("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    add("--speed", type=float, nargs="+", default=[1.5, 3.0, 6.0], help="EMULATED ratios")
    add("--batch", type=int, nargs="+", default=[1, 4, 16])
    add("--count", type=int, default=16, help="prompts of a load")
    add("--nodes", type=int, default=8, help="K: drafted tokens a step, and after each guess")
    add("--rows", type=int, default=24, help="of a draft forward")
    add("--phrase", type=int, default=32, help="retrieved tokens of one, at most (DOUBLE)")
    add("--warm", type=int, default=6, help="tokens of each answer before the timed part")
    add("--tokens", type=int, default=24, help="of the first answer that ends the timed part, after those")
    add("--plain-tokens", type=int, default=6, help="the same for plain decoding, whose steps all yield one")
    add("--minutes", type=float, default=60.0, help="after which nothing is begun")
    add_dtype(parser)
    parser.set_defaults(json=Path("var/loads.json"))
    given = parser.parse_args(argv)
    numbers = ("speed", "batch", "count", "nodes", "rows", "warm", "tokens", "plain_tokens", "minutes")
    check_positive(parser, given, *numbers)
    if "plain" not in given.variants:
        parser.error("--variants: the others are compared with plain")
    if not set(BESIDE) & set(given.variants):
        parser.error(
            f"--variants: none of {', '.join(BESIDE)}, of whose draft forwards --speed is a multiple"
        )
    if "mirror" in given.variants and given.early_exit is None:
        parser.error("--early-exit: mirror needs the file")
    if given.count < max(given.batch):
        parser.error(f"--count: {given.count} prompts do not fill a batch of {max(given.batch)}")
    return given


def requests_of(given: argparse.Namespace, pool: Pool) -> dict[str, list[Request]]:
    """By load, `count` each. Raises ValueError where the recorded prompts do not suffice."""
    found = {}
    for load in given.loads:
        found[load] = long(pool, given.count) if load == "long" else _of_case(load, pool, given.count)
        if len(found[load]) < given.count:
            raise ValueError(f"--prompts: {len(found[load])} for {load}, {given.count} are needed")
    return found


def _of_case(load: str, pool: Pool, count: int) -> list[Request]:
    (groups,) = CASES[load](pool, [1], count).groups.values()
    return [request for group in groups for request in group][:count]


def long(pool: Pool, count: int) -> list[Request]:
    """As the case of benchmarks.serve, of LONG_TOKENS each; every request begins with other prompts."""
    found = []
    for first in range(count):
        turn = first * len(pool.rows) // count
        texts, size = [], 0
        for row in pool.rows[turn:] + pool.rows[:turn]:
            size += len(row["prompt_tokens"])
            if size > LONG_TOKENS:
                break
            texts.append(row["prompt"])
        found.append(Request("long", pool.chat("\n\n".join([*texts, SUMMARIZE]))))
    return found


def kv_tokens(requests: dict[str, list[Request]], batch: int, until: int) -> int:
    """Slots of each cache: all prompts, and twice a batch of answers that are cut when one has `until` tokens."""
    prompts = sum(len(request.prompt) for of in requests.values() for request in of)
    return prompts + 2 * batch * (until + BEYOND)


def known_answers(requests: Sequence[Request], folder: Path) -> Path:
    """A file of these requests' recorded answers, to be built into the prior."""
    rows = [{"answer": "", "prompt_tokens": [], "tokens": request.output.tolist()} for request in requests]
    path = folder / "known.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Run:
    """requests: by load."""

    def __init__(
        self,
        given: argparse.Namespace,
        servers: dict[str, SglangServer],
        latency: AdjustableLatency,
        requests: dict[str, list[Request]],
        journal: Journal,
    ) -> None:
        self._given, self._servers, self._latency, self._journal = given, servers, latency, journal
        self._requests = requests
        self._full_forward_ms = 0.0  # of the draft model: the unit of the speed ratios

    def first_tokens(self) -> None:
        """Each prompt alone, for the first time: prefill writes its KV into the prefix cache."""
        for turn, (load, request) in enumerate(self._all()):
            for variant in rotated(self._given.variants, turn):
                (course,) = decode(self._servers[variant], [request.prompt], 2)
                record = {"load": load, "prompt": turn, "tokens": len(request.prompt), "variant": variant}
                self._journal.add("first", record | {"seconds": course.times[0] - course.asked})

    def settle(self) -> None:
        """A load at each batch size, after which the draft processes' times are known."""
        self._latency.set(PILOT_MS)
        times = DraftTimes()
        for batch in sorted(self._given.batch):
            for variant in self._given.variants[1:]:
                watch = Watch(variant, self._servers[variant])
                self._answer(variant, self._requests[self._given.loads[0]][:batch], self._given.tokens)
                if variant in BESIDE:
                    times.learn(watch.added()["draft"])
        self._full_forward_ms = 1e3 * times.forward(self._given.rows)
        say(f"a draft forward of {self._given.rows} rows takes {self._full_forward_ms:.0f} ms")

    def measure_all(self) -> None:
        """In rounds, each of which has every load, ratio and batch size."""
        until = time.monotonic() + 60 * self._given.minutes
        for turn in itertools.count():
            for speed, batch in itertools.product(self._given.speed, self._given.batch):
                self._latency.set(speed * self._full_forward_ms)
                self._learn(speed, batch, turn == 0)
                for load in self._given.loads:
                    if time.monotonic() > until:
                        say("the time is up")
                        return
                    for group in self._groups(batch, turn):
                        self._group(load, speed, batch, group)

    def _learn(self, speed: float, batch: int, first: bool) -> None:
        """Step times of this ratio and batch size, with the first load's last prompts; at first also what each of these had of the
        draft model."""
        prompts = [request.prompt for request in self._requests[self._given.loads[0]][-batch:]]
        sampling = {
            "temperature": 0,
            "max_new_tokens": SHOWING if first else SETTLING,
            "ignore_eos": True,
        }
        for variant in self._given.variants[1:]:
            answers = self._servers[variant].generate_many(prompts, batch, **sampling)
            if first and variant in BESIDE:
                accepted = [answer["meta_info"][SUMMARY]["accepted"] for answer in answers]
                labels = {"speed": speed, "batch": batch, "variant": variant}
                self._journal.add("sessions", labels | {"accepted": [of.get(MODEL, 0) for of in accepted]})

    def _groups(self, batch: int, turn: int) -> range:
        """Numbers of the groups of a round, each of which stands for `batch` prompts."""
        count = math.ceil(ANSWERS / batch)
        return range(turn * count, (turn + 1) * count)

    def _group(self, load: str, speed: float, batch: int, group: int) -> None:
        requests = self._requests[load]
        begin = group * batch % (len(requests) - batch + 1)
        labels = {"load": load, "speed": speed, "batch": batch, "group": group}
        said = []
        for variant in rotated(self._given.variants, group):
            given, watch = self._given, Watch(variant, self._servers[variant])
            plain = variant == "plain"
            warm, tokens = (PLAIN_WARM, given.plain_tokens) if plain else (given.warm, given.tokens)
            courses = self._answer(variant, requests[begin : begin + batch], warm + tokens)
            try:
                part = window(courses, warm, warm + tokens)
            except ValueError as error:
                say(f"{load}, speed {speed:g}, batch {batch}, group {group} is left out: {variant}: {error}")
                self._journal.add("left_out", labels | {"variant": variant})
                return
            record = part | watch.added()
            self._journal.add("group", labels | {"variant": variant} | record)
            said.append(f"{variant} {record['tokens'] / record['seconds']:.1f}")
        say(f"{load}, speed {speed:g}, batch {batch}, group {group}: {', '.join(said)} tokens/s")

    def _answer(self, variant: str, requests: Sequence[Request], until: int) -> list[Course]:
        temperature = 1.0 if requests[0].category == "unrelated" else 0.0
        return decode(self._servers[variant], [request.prompt for request in requests], until, temperature)

    def _all(self) -> Iterator[tuple[str, Request]]:
        return ((load, request) for load, requests in self._requests.items() for request in requests)


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    exit_when_terminated()
    pool = Pool(
        [row for file in given.prompts for row in recorded_rows(file)],
        AutoTokenizer.from_pretrained(given.model),
    )
    requests = requests_of(given, pool)
    files = [*given.prompts, *given.prior]
    path = given.json.with_suffix(SUFFIX)
    journal = Journal(path, manifest("beside.loads", files, given))
    with tempfile.TemporaryDirectory(prefix="bench-loads-") as name:
        folder = Path(name)
        latency = AdjustableLatency(folder / "latency")
        answers = [known_answers(requests["repeated"], folder)] if "repeated" in requests else []
        knowledge = prepare((), [*given.prior, *answers], given.model / "tokenizer.json", folder)
        setup = Setup(
            given.model,
            given.draft,
            given.dtype,
            knowledge.prior,
            given.nodes,
            given.rows,
            given.phrase,
            "adaptive",
            max(given.batch),
            latency.environment(),
            given.early_exit,
            kv_tokens(requests, max(given.batch), given.warm + given.tokens),
        )
        try:
            with all_running(given.variants, setup, folder) as servers:
                run = Run(given, servers, latency, requests, journal)
                run.first_tokens()
                run.settle()
                run.measure_all()
        finally:
            finish("beside.loads", given, files, **summarise(path))


if __name__ == "__main__":
    main()
