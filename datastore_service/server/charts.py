"""Line charts of a namespace's last hour, as the paths of an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from datastore_service.engine.stats import EngineStats
from datastore_service.protocol.tree import Tier
from datastore_service.server.history import SAMPLE_SECONDS, SAMPLES

WIDTH, HEIGHT = 360, 100
SPAN = SAMPLES * SAMPLE_SECONDS
RATE_SAMPLES = 3  # a rate is taken over the last minute
NO_VALUE = "–"

Samples = Sequence[tuple[float, EngineStats]]  # seconds ago, counters; oldest first
Points = Sequence[tuple[float, float | None]]  # seconds ago, value; None leaves a gap
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart.

    path: `d` of an SVG path in a picture of WIDTH by HEIGHT.
    latest: its last value, as text."""

    name: str
    path: str
    latest: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of the last hour. The lower edge is 0, the right edge now, the left edge an hour ago.

    top: the value at the upper edge, as text."""

    title: str
    top: str
    lines: tuple[Line, ...]


def charts(samples: Samples) -> list[Chart]:
    hits: dict[str, Points] = {}
    accepted: dict[str, Points] = {}
    held: dict[str, Points] = {}
    drafts = [stats.drafts for _, stats in samples]
    for tier in Tier:
        name = tier.name.lower()
        counted = [stats.tiers[tier] for _, stats in samples]
        hits[name] = _ratios(samples, [each.hits for each in counted], drafts)
        accepted[name] = _ratios(
            samples, [each.accepted for each in counted], [each.drafted for each in counted]
        )
        held[name] = [(age, stats.tiers[tier].nbytes) for age, stats in samples]
    opened: dict[str, Points] = {"sessions": [(age, stats.sessions) for age, stats in samples]}
    return [
        _chart("Drafts with a token of the tier", hits, percent),
        _chart("Drafted tokens that came true", accepted, percent),
        _chart("Size", held, size),
        _chart("Open sessions", opened, count),
    ]


def percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def size(nbytes: float) -> str:
    """Three digits, decimal units."""
    units = iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    while nbytes >= 999.5 and (larger := next(units, None)):
        nbytes, unit = nbytes / 1000, larger
    return f"{nbytes:,.0f} {unit}" if nbytes >= 99.5 else f"{nbytes:.3g} {unit}"


def count(value: float) -> str:
    return f"{value:,.0f}"


def _ratios(samples: Samples, parts: list[int], wholes: list[int]) -> Points:
    """parts / wholes over the minute before each sample. None if nothing was counted, or if the counters fell because the
    namespace was dropped and created again."""
    points = []
    for number in range(1, len(samples)):
        before = max(0, number - RATE_SAMPLES)
        part, whole = parts[number] - parts[before], wholes[number] - wholes[before]
        points.append((samples[number][0], part / whole if part >= 0 and whole > 0 else None))
    return points


def _chart(title: str, lines: dict[str, Points], text: Format) -> Chart:
    values = [value for points in lines.values() for _, value in points if value is not None]
    top = _round_up(max(values, default=0.0))
    return Chart(title, text(top), tuple(_line(name, points, top, text) for name, points in lines.items()))


def _line(name: str, points: Points, top: float, text: Format) -> Line:
    latest = points[-1][1] if points else None
    return Line(name, _path(points, top), NO_VALUE if latest is None else text(latest))


def _path(points: Points, top: float) -> str:
    """A line of zero length begins each part after a gap, so that a single point is drawn as a dot."""
    path, drawing = "", False
    for age, value in points:
        if value is not None:
            x, y = WIDTH * (1 - age / SPAN), HEIGHT * (1 - value / top)
            path += f"L{x:.1f} {y:.1f}" if drawing else f"M{x:.1f} {y:.1f}h0"
        drawing = value is not None
    return path


def _round_up(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if value <= step * power * (1 + 1e-9))
