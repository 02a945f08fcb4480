"""Ratios of throughputs with bootstrap intervals, paired by prompt group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A point estimate with its 95% bootstrap interval; a single group has none (None), for nothing is known of its spread."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        return (
            f"{self.value:.2f}" if self.low is None else f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"
        )

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def as_json(value: object) -> object:
    """`default` of json.dumps for reports."""
    return value.as_dict() if isinstance(value, Interval) else str(value)


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> Interval:
    """sum(numerators) / sum(denominators), groups resampled together."""
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    picks = _picks(len(top), seed)
    return _interval(top.sum() / bottom.sum(), len(top), top[picks].sum(1) / bottom[picks].sum(1))


def throughput_ratio(
    tokens: Sequence[float],
    seconds: Sequence[float],
    base_tokens: Sequence[float],
    base_seconds: Sequence[float],
    seed: int = 0,
) -> Interval:
    """(sum tokens / sum seconds) over the same of the baseline; element i of all four is the same prompt group."""
    arrays = [np.asarray(a, float) for a in (tokens, seconds, base_tokens, base_seconds)]
    picks = _picks(len(arrays[0]), seed)

    def ratio(sums: list) -> np.ndarray:
        return (sums[0] / sums[1]) / (sums[2] / sums[3])

    return _interval(
        ratio([a.sum() for a in arrays]), len(arrays[0]), ratio([a[picks].sum(1) for a in arrays])
    )


def _picks(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, size, (RESAMPLES, size))


def _interval(value: float, groups: int, samples: np.ndarray) -> Interval:
    if groups == 1:
        return Interval(float(value), None, None)
    low, high = np.percentile(samples, (2.5, 97.5))
    return Interval(float(value), float(low), float(high))
