"""The parts of a check: each makes one row of the table."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_patches.check.comparison import Answers, Margin, compare, greedy_margin, noise_margin
from sglang_patches.check.engines import Engines
from sglang_patches.check.made import early_exit, timed_target
from sglang_patches.check.pinned import SEED
from sglang_patches.check.results import OK, Result, Results, host_table
from sglang_patches.check.setup import PLAIN, Setup
from sglang_patches.demo.corpus import PROMPTS as SPEED_PROMPTS
from sglang_patches.methods.registry import HEADS, METHODS

PROMPTS = (
    "The days of the week are Monday, Tuesday, Wednesday, Thursday,",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List the planets of the solar system in order from the sun, one a line.",
    "Repeat this sentence five times: The quick brown fox jumps over the lazy dog.",
    "Explain in three sentences why the sky is blue.",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
)
ROUNDS = 2  # the second finds the answers of the first in the datastore, so that whole trees are accepted
GREEDY, SAMPLED, SPEED = "greedy answers", "sampled answers", "tokens a second"
TEMPERATURES = {GREEDY: 0.0, SAMPLED: 1.0}
BATCHES = (1, 8, 32)
# First what is new to a GPU: a draft model on it, and one on the CPU. Then what is faster, then the other methods.
FIRST, TIMED = ("SAGUARO", "DUO", "SSSD"), (PLAIN, "SSSD", "SAGUARO")
LAST = tuple(method for method in METHODS if method not in FIRST)
KILLED = "SAGUARO"  # has its draft process killed; all methods start and watch theirs with the same code


@dataclass(frozen=True)
class Part:
    """One part of a check, which makes one row of the table.

    name: of the row.
    needs: rows that have to be ok before.
    engine: whose answers it asks for, "" for none.
    """

    name: str
    run: Callable[[], Result]
    needs: tuple[str, ...] = ()
    engine: str = ""


def kernel_parts(device: str) -> list[Part]:
    """What needs no model."""
    from sglang_patches.check import kernels

    def host() -> Result:
        return Result(OK if host_table()[1] else "python -m sglang_patches.check names the rows")

    def kernel(check: Callable[[str], str | None]) -> Result:
        return Result(check(device) or OK)

    checks = kernels.CHECKS.items()
    return [
        Part("host symbols", host),
        *(Part(name, functools.partial(kernel, check)) for name, check in checks),
    ]


def engine_parts(setup: Setup, results: Results, engines: Engines, everything: bool) -> list[Part]:
    """The parts of a check in the order in which they run, the most telling ones first. Parts that ask the same engine stand together."""
    asked = _Asked(setup, results, engines)
    if not everything:
        return [*asked.greedy(PLAIN), *asked.greedy(setup.method)]
    if setup.has_head:
        return _one_after_another(
            [part for who in (PLAIN, setup.method) for part in (*asked.greedy(who), asked.sampled(who))]
            + [asked.speed(who) for who in (PLAIN, setup.method)]
        )
    parts = [*asked.greedy(PLAIN), asked.sampled(PLAIN)]
    for method in FIRST:
        parts += [*asked.greedy(method), asked.sampled(method)]
        parts += [asked.killed(method)] if method == KILLED else []
    parts += [asked.speed(method) for method in TIMED]
    for method in LAST:
        parts += [*asked.greedy(method), asked.sampled(method)]
    return _one_after_another(parts)


def _one_after_another(parts: Sequence[Part]) -> list[Part]:
    """The parts of each engine together."""
    places = list(dict.fromkeys(part.engine for part in parts))
    return sorted(parts, key=lambda part: places.index(part.engine))


class _Asked:
    """Parts that ask engines. A method's answers are compared with plain decoding's, which an earlier part has kept."""

    def __init__(self, setup: Setup, results: Results, engines: Engines) -> None:
        self._setup, self._results, self._engines = setup, results, engines

    def greedy(self, method: str) -> list[Part]:
        """The start, and the answers."""
        return [
            Part(f"{method}: start", functools.partial(self._start, method), engine=method),
            self._answers(method, GREEDY, greedy_margin),
        ]

    def sampled(self, method: str) -> Part:
        return self._answers(method, SAMPLED, noise_margin(SEED))

    def _answers(self, method: str, kind: str, margin: Margin) -> Part:
        run = functools.partial(self._answer, method, kind, margin)
        return Part(f"{method}: {kind}", run, _needs(method, kind), method)

    def killed(self, method: str) -> Part:
        run = functools.partial(self._kill, method)
        return Part(f"{method}: draft process killed", run, _needs(method, GREEDY), method)

    def speed(self, method: str) -> Part:
        engine = method if self._setup.device == "cpu" else f"{method}, timed"
        return Part(
            f"{method}: {SPEED}", functools.partial(self._speed, method), _needs(method, SPEED), engine
        )

    def _start(self, method: str) -> Result:
        """The start probes tree attention: a backend that ignores the mask ends the engine here, by name."""
        self._engines.get(method, self._flags(method, self._setup.model))
        return Result(OK)

    def _ask(self, method: str, target: Path, task: str, **arguments: object) -> Any:
        return self._engines.ask(
            method, self._flags(method, target), task, tokens=self._setup.tokens, **arguments
        )

    def _flags(self, method: str, target: Path) -> list[str]:
        file = None
        if method in METHODS and METHODS[method].early_exit:
            file = early_exit(target, self._results.folder / "early-exit.safetensors")
        return self._setup.engine_flags(method, target, file)

    def _answer(self, method: str, kind: str, margin: Margin) -> Result:
        """Greedy answers are asked for as they are served: only plain decoding's need log-probabilities."""
        logprobs = method == PLAIN or kind == SAMPLED
        wishes = {"rounds": ROUNDS, "temperature": TEMPERATURES[kind], "logprobs": logprobs}
        said = self._ask(method, self._setup.model, "answer", prompts=list(PROMPTS), **wishes)
        self._results.keep_answers(f"{method} {kind}", said)
        ours = Answers(**said)
        if method == PLAIN:
            return Result(OK, data=_summary(ours))
        state, margins = compare(self._plain(kind), ours, margin)
        if state.startswith(OK):
            state = _drafts_in_vain(method, ours) or state
        return Result(state, data=_summary(ours) | {"margins": margins})

    def _plain(self, kind: str) -> Answers:
        return Answers(**self._results.answers(f"{PLAIN} {kind}"))

    def _kill(self, method: str) -> Result:
        said = self._ask(method, self._setup.model, "kill draft", prompts=list(PROMPTS))
        ours = Answers(**said.pop("answers"))
        state, margins = compare(self._plain(GREEDY), ours, greedy_margin)
        return Result(state, data=_summary(ours) | said | {"margins": margins})

    def _speed(self, method: str) -> Result:
        target = timed_target(self._setup.model, self._setup.device, self._results.folder / "widened")
        prompts = SPEED_PROMPTS.read_text().splitlines()
        found = self._ask(method, target, "speed", prompts=prompts, batches=list(BATCHES))
        plain = None if method == PLAIN else self._results.rows[f"{PLAIN}: {SPEED}"].data
        return Result(f"{OK}, {_told(found, plain)}", data=found)


def _needs(method: str, kind: str) -> tuple[str, ...]:
    """The method's start, and what plain decoding has for it."""
    return (f"{method}: start", *(() if method == PLAIN else (f"{PLAIN}: {kind}",)))


def _drafts_in_vain(method: str, ours: Answers) -> str | None:
    """Says whose drafts were never accepted, None if all are now and then."""
    from sglang_patches.ledger.usage import HEAD, source_name

    if ours.tokens_per_step <= 1:
        return f"no drafted token was accepted ({ours.tokens_per_step:.2f} tokens a step)"
    if method in HEADS and not ours.accepted.get(source_name(HEAD)):
        return "no token of the head was accepted: it may be another model's"
    return None


def _summary(answers: Answers) -> dict:
    told = {"answers": len(answers), "tokens_per_step": answers.tokens_per_step}
    return told | ({"accepted": answers.accepted} if answers.accepted else {})


def _told(found: dict, plain: dict | None) -> str:
    """Tokens a second by batch size, and how many times plain decoding's they are."""
    words = []
    for batch, of in found.items():
        speed = of["tokens_per_second"]
        times = f" (x {speed / plain[batch]['tokens_per_second']:.2f})" if plain else ""
        words.append(f"batch {batch}: {speed:.0f}{times}")
    return ", ".join(words)


def in_order(parts: Sequence[Part], results: Results) -> list[Part]:
    """Those that a call runs: what has not run yet, then what failed in an earlier call, and what needs that."""
    late = set(results.failed())
    for part in parts:
        if late & set(part.needs):
            late.add(part.name)
    left = [part for part in parts if part.name not in results.rows or part.name in results.failed()]
    return sorted(left, key=lambda part: part.name in late)


def run(part: Part, results: Results) -> None:
    """Keeps its result, but none of a part whose needs are not met, or that is stopped."""
    if any(need not in results.rows or not results.rows[need].fine for need in part.needs):
        return
    began = time.perf_counter()
    try:
        found = part.run()
    except Exception as error:  # the table shows every part, also those after one that fails
        found = Result(f"{type(error).__name__}: {error}")
    results.add(part.name, Result(found.state, round(time.perf_counter() - began, 1), found.data))
