"""`python -m benchmarks.beside.loads`: every method under several kinds of load, at emulated speed ratios and batch sizes.

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
from collections.abc import Sequence
from pathlib import Path

from benchmarks.beside.servers import ALGORITHMS, BESIDE, add_servers, check_variants, rotated, say
from benchmarks.options import Parser, add_dtype
from benchmarks.serve.cases import CASES, SUMMARIZE, Pool, Request
from benchmarks.traces import SHIPPED, recorded_rows

LOADS = ("mixed", "repeated", "followup", "long", "unrelated")
LONG_TOKENS = 600  # of a long prompt, at most: each draft process prefills it anew
ANSWERS = 2  # of a load, ratio and batch size in a round, at least
SETTLING = 16  # tokens after a change of the ratio: step times are learned
# The same in the first round, whose answers show what each request has of the draft model: for half of 16 tokens that still reads the
# prompts of a batch of 32.
SHOWING = 96


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("beside.loads", __doc__, "var/loads.json")
    parser.add("--prompts", [SHIPPED], "files of python -m benchmarks.record")
    parser.add("--loads", list(LOADS), "what is asked", choices=LOADS)
    parser.add("--speed", [1.5, 3.0, 6.0], "emulated target step over a full draft forward")
    parser.add("--count", 16, "prompts of a load")
    add_servers(
        parser, ("plain", *ALGORITHMS), ["plain", "sssd", "saguaro", "double", "duo", "adaptive"], batch=[1, 4, 16],
        nodes=8, warm=6, plain_tokens=6, phrase=32, minutes=60.0,
    )  # fmt: skip
    add_dtype(parser)
    given = parser.parse_args(argv)
    check_variants(parser, given, "plain")
    if not set(BESIDE) & set(given.variants):
        parser.error(
            f"--variants: none of {', '.join(BESIDE)}, of whose draft forwards --speed is a multiple"
        )
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
    from benchmarks.beside.window import BEYOND

    prompts = sum(len(request.prompt) for of in requests.values() for request in of)
    return prompts + 2 * batch * (until + BEYOND)


def known_answers(requests: Sequence[Request], folder: Path) -> Path:
    """A file of these requests' recorded answers, to be built into the prior."""
    rows = [{"answer": "", "prompt_tokens": [], "tokens": request.output.tolist()} for request in requests]
    path = folder / "known.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Run:
    """What is measured of the servers (benchmarks.beside.run). requests: by load."""

    def __init__(self, servers, requests: dict[str, list[Request]]) -> None:
        self._servers, self._given, self._requests = servers, servers.given, requests
        self._first = requests[servers.given.loads[0]]
        self._full_forward_ms = 0.0  # of the draft model: the unit of the speed ratios

    def first_tokens(self) -> None:
        """Each prompt alone, for the first time: prefill writes its KV into the prefix cache."""
        from benchmarks.beside.window import decode

        asked = [(load, request.prompt) for load, requests in self._requests.items() for request in requests]
        for turn, (load, prompt) in enumerate(asked):
            for variant in rotated(self._given.variants, turn):
                (course,) = decode(self._servers.running[variant], [prompt], 2)
                record = {"load": load, "prompt": turn, "tokens": len(prompt), "variant": variant}
                self._servers.journal.add("first", record | {"seconds": course.times[0] - course.asked})

    def settle(self) -> None:
        """A load at each batch size, after which the draft processes' times are known."""
        from benchmarks.beside.costs import DraftTimes
        from benchmarks.beside.run import PILOT_MS

        self._servers.emulate(PILOT_MS)
        times = DraftTimes()
        for batch in sorted(self._given.batch):
            for variant in self._given.variants[1:]:
                _, record = self._answer(variant, self._first[:batch], self._given.tokens)
                if variant in BESIDE:
                    times.learn(record["draft"])
        self._full_forward_ms = 1e3 * times.forward(self._given.rows)
        say(f"a draft forward of {self._given.rows} rows takes {self._full_forward_ms:.0f} ms")

    def measure_all(self) -> None:
        """Measures in rounds, each of which has every load, ratio and batch size."""
        given, in_time = self._given, self._servers.in_time()
        for turn in itertools.count():
            for speed, batch in itertools.product(given.speed, given.batch):
                self._servers.emulate(speed * self._full_forward_ms)
                self._learn(speed, batch, turn == 0)
                groups = math.ceil(ANSWERS / batch)  # each stands for `batch` prompts
                for load in given.loads:
                    if not in_time():
                        return
                    for group in range(turn * groups, (turn + 1) * groups):
                        self._group(load, speed, batch, group)

    def _learn(self, speed: float, batch: int, first: bool) -> None:
        """Step times of this ratio and batch size, with the first load's last prompts; at first also what each of these had of the
        draft model."""
        from sglang_patches.ledger.usage import DRAFT_MODEL, source_name
        from sglang_patches.reports import SUMMARY

        model, prompts = source_name(DRAFT_MODEL), [request.prompt for request in self._first[-batch:]]
        sampling = {"temperature": 0, "max_new_tokens": SHOWING if first else SETTLING, "ignore_eos": True}
        for variant in self._given.variants[1:]:
            answers = self._servers.running[variant].generate_many(prompts, batch, **sampling)
            if first and variant in BESIDE:
                accepted = [answer["meta_info"][SUMMARY]["accepted"].get(model, 0) for answer in answers]
                labels = {"speed": speed, "batch": batch, "variant": variant}
                self._servers.journal.add("sessions", labels | {"accepted": accepted})

    def _group(self, load: str, speed: float, batch: int, group: int) -> None:
        from benchmarks.beside.window import window

        requests, said = self._requests[load], []
        begin = group * batch % (len(requests) - batch + 1)
        labels = {"load": load, "speed": speed, "batch": batch, "group": group}
        where = f"{load}, speed {speed:g}, batch {batch}, group {group}"
        for variant in rotated(self._given.variants, group):
            warm, until = self._servers.part(variant)
            courses, record = self._answer(variant, requests[begin : begin + batch], until)
            try:
                record = window(courses, warm, until) | record
            except ValueError as error:
                say(f"{where} is left out: {variant}: {error}")
                self._servers.journal.add("left_out", labels | {"variant": variant})
                return
            self._servers.journal.add("group", labels | {"variant": variant} | record)
            said.append(f"{variant} {record['tokens'] / record['seconds']:.1f}")
        say(f"{where}: {', '.join(said)} tokens/s")

    def _answer(self, variant: str, requests: Sequence[Request], until: int) -> tuple[list, dict]:
        temperature = 1.0 if requests[0].category == "unrelated" else 0.0
        prompts = [request.prompt for request in requests]
        return self._servers.answered(variant, prompts, until, temperature)


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    from transformers import AutoTokenizer

    from benchmarks.beside.run import measured
    from benchmarks.beside.summary import summarise_loads

    rows = [row for file in given.prompts for row in recorded_rows(file)]
    asked = requests_of(given, Pool(rows, AutoTokenizer.from_pretrained(given.model)))
    repeated = asked.get("repeated", [])
    more = {
        "answers": lambda folder: [known_answers(repeated, folder)] if repeated else [],
        "tokens": kv_tokens(asked, max(given.batch), given.warm + given.tokens),
    }
    files = [*given.prompts, *given.prior]
    with measured("beside.loads", given, files, summarise_loads, given.dtype, "adaptive", **more) as servers:
        run = Run(servers, asked)
        run.first_tokens()
        run.settle()
        run.measure_all()


if __name__ == "__main__":
    main()
