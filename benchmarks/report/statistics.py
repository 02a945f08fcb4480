"""Ratios of throughputs with 95% intervals, paired by prompt group: bootstrap, and where groups are few Student's t, for the
resamples of two groups hardly leave what the two measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

FEW = 10  # groups
RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A point estimate with its 95% interval; a single group has none (None), for nothing is known of its spread."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        return (
            f"{self.value:.2f}" if self.low is None else f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"
        )

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """sum(numerators) / sum(denominators), groups resampled together."""
    return _ratio([numerators], [denominators])


def throughput_ratio(
    tokens: Sequence[float],
    seconds: Sequence[float],
    base_tokens: Sequence[float],
    base_seconds: Sequence[float],
) -> Interval:
    """(sum tokens / sum seconds) over the same of the baseline; element i of all four is the same prompt group."""
    return _ratio([tokens, base_seconds], [seconds, base_tokens])


def _ratio(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> Interval:
    """The product of the sums above over that of the sums below."""
    columns = np.array([*above, *below], float)  # [column, group]

    def quotient(sums: np.ndarray) -> np.ndarray:
        return sums[: len(above)].prod(0) / sums[len(above) :].prod(0)

    value, groups = float(quotient(columns.sum(1))), columns.shape[1]
    if groups == 1:
        return Interval(value, None, None)
    if groups < FEW:
        spread = _spread_of_logarithm(columns, np.repeat([1.0, -1.0], [len(above), len(below)]))
        return Interval(value, value * float(np.exp(-spread)), value * float(np.exp(spread)))
    picks = np.random.default_rng(0).integers(0, groups, (RESAMPLES, groups))
    low, high = np.percentile(quotient(columns[:, picks].sum(-1)), (2.5, 97.5))
    return Interval(value, float(low), float(high))


def _spread_of_logarithm(columns: np.ndarray, signs: np.ndarray) -> float:
    """Half the width of the 95% interval by Student's t, what each group adds to the logarithm being linearised."""
    from scipy.stats import t as student_t

    groups = columns.shape[1]
    parts = signs @ (columns / columns.sum(1, keepdims=True))
    return float(student_t.ppf(0.975, groups - 1) * np.sqrt(groups / (groups - 1) * (parts**2).sum()))
