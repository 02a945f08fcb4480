"""Tables of the benchmarks that ask what one part costs."""

from __future__ import annotations

import numpy as np

from benchmarks.report.markdown import columns, table
from benchmarks.report.statistics import ratio_of_sums

MILLION = 1e6
ENGINE = {
    "prior": lambda r: f"{r['prior_tokens'] / MILLION:.1f} M",
    "bytes a token": lambda r: f"{r['prior_bytes'] / r['prior_tokens']:.2f}", "seconds to build": "{build_seconds:.1f}",
    "batch": "{batch}", "nodes": "{nodes}", "steps": "{steps}", "p50 µs": "{p50_us:.1f}", "p99 µs": "{p99_us:.1f}",
    "tokens a step": "{tokens_per_step:.2f}",
}  # fmt: skip
BUILD = {
    "tokens": lambda build: f"{build['tokens'] / MILLION:.1f} M", "bytes a token": "{bytes_per_token:.2f}",
    "seconds to sort": "{raw_seconds:.2f}", "seconds to build": "{build_seconds:.2f}", "build / sort": "{ratio:.2f}",
}  # fmt: skip
SESSIONS = {
    "sessions opened and closed": "{sessions}", "bytes a token": "{bytes_per_token:.1f}",
    "MB after a tenth": lambda sessions: f"{sessions['resident_bytes'][0] / MILLION:.1f}",
    "MB at the end": lambda sessions: f"{sessions['resident_bytes'][-1] / MILLION:.1f}",
}  # fmt: skip


def engine(record: dict) -> list[str]:
    text = "One step of the engine in one thread: session, live tier and prior."
    return ["## Time of a draft", "", text, "", *columns(record["results"], ENGINE)]


def rpc(record: dict) -> list[str]:
    settings, results = record["manifest"]["settings"], record["results"]
    ratio = np.percentile([r["service"] / (r["echo"] + r["engine"]) for r in results], (2.5, 50, 97.5))
    parts = ("service", "echo", "engine")
    medians = (f"{np.median([r[part] for r in results]):.0f}" for part in parts)
    text = f"Medians of {len(results)} rounds at batch {settings['batch']}, {settings['nodes']} nodes."
    cells = [(*medians, "{1:.2f} [{0:.2f}, {2:.2f}]".format(*ratio))]
    headings = (*(f"{part}, µs" for part in parts), "service / (echo + engine)")
    return ["## Time of a draft over gRPC", "", text, "", *table(headings, cells)]


def strangers(record: dict) -> list[str]:
    settings, rows = record["manifest"]["settings"], record["results"]
    text = f"{len(rows)} rounds with strangers and as many without, at batch {settings['batch']}."
    cells = []
    for share, name in ((50, "median"), (99, "99th percentile")):
        alone, beside = ([row[f"{which}_{share}"] for row in rows] for which in ("alone", "beside"))
        cells.append(
            (name, f"{np.median(alone):.0f}", f"{np.median(beside):.0f}", ratio_of_sums(beside, alone))
        )
    headings = ("of a draft", "alone, µs", "beside strangers, µs", "ratio")
    return ["## Drafts while strangers hold the ports", "", text, "", *table(headings, cells)]


def upkeep(record: dict) -> list[str]:
    merging = record["merging"]
    steps = [{"beside": name, **merging[name]} for name in ("quiet", "busy", "merging")]
    times = (f"{merging['merging']['p99'] / merging[other]['p99']:.2f}" for other in ("quiet", "busy"))
    text = "While segments merge, the 99th percentile is {} times that at rest and {} times that beside a busy thread."
    return [
        "## Upkeep of the datastore", "", *columns([record["build"]], BUILD),
        *columns(steps, {"beside": "{beside}", "step p50 µs": "{p50:.1f}", "p99 µs": "{p99:.1f}"}),
        text.format(*times), "", *columns([record["sessions"]], SESSIONS),
    ]  # fmt: skip


def host_time(record: dict) -> list[str]:
    names = list(record["results"][0])
    cells = {name: f"{{{name}}}" if at < 3 else f"{{{name}:.2f}}" for at, name in enumerate(names)}
    text = "Milliseconds on the host before the target's forward is launched, medians."
    return ["## Host time of a step", "", text, "", *columns(record["results"], cells)]


def roofline(record: dict) -> list[str]:
    settings, rows = record["manifest"]["settings"], record["results"]
    text = (
        f"A calculation, not a measurement (SSSD, appendix B): {settings['teraflops']} TFLOP/s, {settings['bandwidth']} TB/s,"
        f" context {settings['context']}. The ridge point is {record['ridge']:.0f} FLOPs a byte. Step time over plain decoding by"
        " rows of each request:"
    )
    cells = {
        "batch": "{batch}",
        "plain step, ms": "{plain_ms:.2f}",
        "rows by the rule": "{speculation_length}",
    }
    cost = {length: lambda row, length=length: f"{row['cost'][length]:.2f}" for length in rows[0]["cost"]}
    return ["## What verification costs on a GPU", "", text, "", *columns(rows, cells | cost)]
