"""The tables of every benchmark's record."""

from __future__ import annotations

from benchmarks.report import beside, carrying, costs, drafting, pipelining, replaying, serving, under_loads

COSTS = {
    "engine": costs.engine,
    "rpc": costs.rpc,
    "strangers": costs.strangers,
    "load": carrying.load,
    "upkeep": costs.upkeep,
    "host_time": costs.host_time,
    "length": costs.length,
    "roofline": costs.roofline,
    "split_latency": costs.split_latency,
    "weights": costs.weights,
}
TABLES = COSTS | {
    "replay": replaying.tables,
    "serve": serving.tables,
    "pipeline": pipelining.tables,
    "draft_trace": drafting.tables,
    "beside": beside.tables,
    "beside.loads": under_loads.tables,
}


def of(record: dict) -> list[str]:
    """Lines of Markdown."""
    return TABLES[record["manifest"]["command"]](record)
