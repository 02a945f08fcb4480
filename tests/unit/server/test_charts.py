"""What the charts draw of a namespace's counters."""

import re

import pytest

from datastore_service.engine.stats import EngineStats, TierStats
from datastore_service.protocol.tree import Tier
from datastore_service.server.charts import HEIGHT, SPAN, WIDTH, charts, percent, size
from datastore_service.server.history import SAMPLE_SECONDS, SAMPLES


def stats(drafts: int = 0, sessions: int = 0, **live: int) -> EngineStats:
    tiers = dict.fromkeys(Tier, TierStats()) | {Tier.LIVE: TierStats(**live)}
    return EngineStats(sessions, 0, drafts, 0, tiers)


def aged(*counters: EngineStats) -> list[tuple[float, EngineStats]]:
    """One sample after the other, the last one now."""
    return [(SAMPLE_SECONDS * (len(counters) - 1 - i), s) for i, s in enumerate(counters)]


def drawn(samples, chart: int, line: str = "live") -> tuple[str, str, list[list[tuple[float, float]]]]:
    """A chart's upper edge, a line's last value, and its strokes as (x, y)."""
    picture = charts(samples)[chart]
    found = next(each for each in picture.lines if each.name == line)
    strokes = [
        [tuple(map(float, point.split())) for point in re.split("L", stroke.replace("h0", ""))]
        for stroke in found.path.split("M")[1:]
    ]
    return picture.top, found.latest, strokes


def test_a_share_is_of_the_minute_before():
    """Ten drafts a sample; the tier hits in none, then in all of them."""
    counters = [stats(10 * i, hits=10 * max(0, i - 3)) for i in range(8)]
    top, latest, (stroke,) = drawn(aged(*counters), 0)
    assert (top, latest) == ("100%", "100%")
    shares = [1 - y / HEIGHT for _, y in stroke]
    assert shares == pytest.approx([0, 0, 0, 1 / 3, 2 / 3, 1, 1], abs=0.01)
    assert stroke[-1][0] == WIDTH
    assert stroke[0][0] == pytest.approx(WIDTH * (1 - 6 / SAMPLES), abs=0.1)


def test_a_minute_without_drafts_is_a_gap():
    counted = [0, 10, 10, 10, 10, 10, 20]
    _, latest, strokes = drawn(aged(*(stats(n, hits=n) for n in counted)), 0)
    assert [len(stroke) for stroke in strokes] == [3, 1]
    assert latest == "100%"
    _, latest, _ = drawn(aged(*(stats(n, hits=n) for n in counted[:-1])), 0)
    assert latest == "–"


def test_a_namespace_that_began_anew_is_a_gap():
    """Its counters start again at 0."""
    counted = [100, 110, 5, 10, 15, 20]
    _, _, strokes = drawn(aged(*(stats(n, hits=n) for n in counted)), 0)
    assert [len(stroke) for stroke in strokes] == [1, 1]


def test_what_came_true_is_a_share_of_what_the_tier_drafted():
    samples = aged(stats(5), stats(9, drafted=200, accepted=30))
    assert drawn(samples, 1)[:2] == ("20%", "15%")


def test_sizes_and_sessions_are_drawn_as_they_were():
    samples = aged(stats(sessions=3, nbytes=0), stats(sessions=1, nbytes=1_500_000))
    top, latest, (stroke,) = drawn(samples, 2)
    assert (top, latest, [y for _, y in stroke]) == ("2 MB", "1.5 MB", [HEIGHT, HEIGHT / 4])
    top, latest, (stroke,) = drawn(samples, 3, "sessions")
    assert (top, latest, [y for _, y in stroke]) == ("5", "1", [40.0, 80.0])


def test_nothing_counted_is_nothing_drawn():
    for samples in ([], aged(stats())):
        assert [drawn(samples, chart)[2] for chart in (0, 1)] == [[], []]


def test_an_hour_fills_the_width():
    samples = [(SPAN - i * SAMPLE_SECONDS, stats()) for i in range(SAMPLES + 1)]
    _, _, (stroke,) = drawn(samples, 2)
    assert (stroke[0][0], stroke[-1][0]) == (0, WIDTH)


def test_numbers_are_short():
    assert [size(n) for n in (0, 999, 1500, 999_999, 123_456_789, 5 * 10**12)] == [
        "0 B", "999 B", "1.5 kB", "1 MB", "123 MB", "5,000 GB"
    ]  # fmt: skip
    assert [percent(v) for v in (0, 0.0123, 0.5, 1)] == ["0%", "1.23%", "50%", "100%"]
