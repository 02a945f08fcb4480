"""The service in a browser: what the tiers hold, how often they hit, how much of the drafts came true."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from jinja2 import Environment, PackageLoader, StrictUndefined

from datastore_service.engine.stats import EngineStats, TierStats
from datastore_service.protocol.tree import Tier
from datastore_service.server.charts import HEIGHT, NO_VALUE, WIDTH, Chart, charts, count, percent, size
from datastore_service.server.history import SAMPLE_SECONDS, History
from datastore_service.server.namespaces import HostedNamespace, Namespaces

COLUMNS = ("tokens", "size", "segments", "drafts with it", "drafted", "came true", "share")


@dataclass(frozen=True, slots=True)
class _Tier:
    """A row of the table. cells: one for each of COLUMNS."""

    name: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Namespace:
    hosted: HostedNamespace
    stats: EngineStats
    tiers: list[_Tier]
    charts: list[Chart]


class StatusPage:
    """Escapes what it shows, because clients choose the names. streams: returns how many are open."""

    def __init__(self, namespaces: Namespaces, history: History, streams: Callable[[], int]) -> None:
        self._namespaces, self._history, self._streams = namespaces, history, streams
        self._started = time.monotonic()
        loader = PackageLoader("datastore_service.server")
        environment = Environment(
            loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        self._template = environment.get_template("status.html")

    def html(self) -> str:
        return self._template.render(
            version=version("specstore"),
            uptime=_duration(time.monotonic() - self._started),
            streams=self._streams(),
            refresh=int(SAMPLE_SECONDS),
            columns=COLUMNS,
            namespaces=[self._namespace(hosted) for hosted in self._namespaces],
            width=WIDTH,
            height=HEIGHT,
        )

    def _namespace(self, hosted: HostedNamespace) -> _Namespace:
        stats = hosted.engine.stats()
        rows = [_Tier(tier.name.lower(), _cells(stats.tiers[tier], stats.drafts)) for tier in Tier]
        return _Namespace(hosted, stats, rows, charts(self._history.of(hosted.namespace)))


def _cells(tier: TierStats, drafts: int) -> tuple[str, ...]:
    return (
        count(tier.tokens),
        size(tier.nbytes),
        count(tier.segments),
        _share(tier.hits, drafts),
        count(tier.drafted),
        count(tier.accepted),
        _share(tier.accepted, tier.drafted),
    )


def _share(part: int, whole: int) -> str:
    return percent(part / whole) if whole else NO_VALUE


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours >= 48:
        return f"{hours // 24} days"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
