"""Figures of a level, and the search for the rate at which the service is at its limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.load.engine import Taken

RAISE = 1.25  # from one rate to the next
MOST_LEVELS = 40
HELD = 0.95  # of the offered steps must have been taken
BUSY = 0.9  # of a processor, or of all: no more is to be had


def figures(taken: Taken, rate: float, streams: int, seconds: float) -> dict:
    """rate: offered steps per second of a stream. Raises ValueError for a level without a step."""
    if not taken.latencies:
        raise ValueError(f"rate: no step was taken in {seconds:.0f} s at {rate:g} steps per second")
    milliseconds, late = 1e3 * np.array(taken.latencies), 1e3 * np.array(taken.late)
    steps = len(milliseconds)
    return {
        "rate": rate, "achieved": steps / streams / seconds, "steps": steps,
        **dict(zip(("p50_ms", "p99_ms", "p999_ms"), np.percentile(milliseconds, (50, 99, 99.9)), strict=True)),
        "longest_ms": milliseconds.max(), "late_p50_ms": np.percentile(late, 50), "late_p99_ms": np.percentile(late, 99),
        "steps_per_second": steps / seconds, "tokens_per_second": taken.tokens / seconds,
        "session_steps_per_second": taken.session_steps / seconds, "tokens_per_step": taken.tokens / taken.session_steps,
        "missed": taken.missed, "refused": dict(taken.refused), "broken": taken.broken,
    }  # fmt: skip


def excess(level: dict, bound: float) -> str:
    """What is beyond the limit at a level; "" if nothing is. bound: of the 99th percentile, in ms."""
    if level["p99_ms"] > bound:
        return f"p99 {level['p99_ms']:.1f} ms is above {bound:g} ms"
    if level["late_p99_ms"] > bound:
        return f"steps were sent {level['late_p99_ms']:.1f} ms (p99) after they were due"
    if level["achieved"] < HELD * level["rate"]:
        return f"{level['achieved']:.1f} of {level['rate']:.1f} steps per second were taken"
    if level["refused"] or level["broken"]:
        return f"{sum(level['refused'].values())} entries were refused, {level['broken']} streams ended"
    return ""


def exhausted(level: dict, processes: int) -> str:
    """The resource that was at its end. processes: of the clients."""
    service, clients, cores = (level[name] for name in ("service_cores", "client_cores", "cores"))
    others = max(0.0, level["machine_busy"] * cores - service - clients)
    shares = f"service {service:.2f}, clients {clients:.2f}, others {others:.2f} of {cores}"
    if level["machine_busy"] >= BUSY:
        return f"the machine's processors: {shares}"
    if clients >= BUSY * processes or level["late_p99_ms"] > level["p99_ms"]:
        return (
            f"the clients and not the service, which need more processes or a machine of their own: {shares}"
        )
    if service >= BUSY:
        return f"the service's interpreter, which runs on one processor at a time: {shares}"
    return f"none that was watched (processors: {shares}), so something else delayed the answers"


def search(measure: Callable[[float], dict], first: float, bound: float) -> tuple[list[dict], str]:
    """Raises the rate until a level is beyond the limit twice in turn: once may be the work of another process. All levels, and
    what was beyond the limit at the last; "" if nothing was at MOST_LEVELS rates. measure: takes a rate in steps per second of a
    stream."""
    levels: list[dict] = []
    for number in range(MOST_LEVELS):
        rate = first * RAISE**number
        levels.append(measure(rate))
        if excess(levels[-1], bound):
            levels.append(measure(rate))
            if beyond := excess(levels[-1], bound):
                return levels, beyond
    return levels, ""


def thinned(samples: Sequence[dict], most: int) -> list[dict]:
    """At most so many of the samples, the first and the last among them."""
    chosen = np.unique(np.linspace(0, len(samples) - 1, min(most, len(samples))).astype(int))
    return [samples[number] for number in chosen]
