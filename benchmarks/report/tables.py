"""The tables of every benchmark's record."""

from __future__ import annotations

from benchmarks.report import beside, carrying, costs, pipelining, replaying, serving

COSTS = {
    "engine": costs.engine,
    "rpc": costs.rpc,
    "strangers": costs.strangers,
    "load": carrying.load,
    "upkeep": costs.upkeep,
    "host_time": costs.host_time,
    "roofline": costs.roofline,
}
TABLES = COSTS | {
    "replay": replaying.tables,
    "serve": serving.tables,
    "pipeline": pipelining.tables,
    "beside": beside.tables,
    "beside.loads": beside.loads,
}


def of(record: dict) -> list[str]:
    """Lines of Markdown."""
    return TABLES[record["manifest"]["command"]](record)
