"""Tables of the benchmarks that ask what one part costs."""

from __future__ import annotations

import numpy as np

from benchmarks.report.markdown import table
from benchmarks.report.statistics import ratio_of_sums

MILLION = 1e6


def engine(record: dict) -> list[str]:
    cells = (
        (
            f"{r['prior_tokens'] / MILLION:.1f} M", f"{r['prior_bytes'] / r['prior_tokens']:.2f}",
            f"{r['build_seconds']:.1f}", r["batch"], r["nodes"], r["steps"], f"{r['p50_us']:.1f}", f"{r['p99_us']:.1f}",
            f"{r['tokens_per_step']:.2f}",
        )
        for r in record["results"]
    )  # fmt: skip
    headings = (
        "prior", "bytes a token", "seconds to build", "batch", "nodes", "steps", "p50 µs", "p99 µs", "tokens a step",
    )  # fmt: skip
    text = "One step of the engine in one thread: session, live tier and prior."
    return ["## Time of a draft", "", text, "", *table(headings, cells)]


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
            (name, f"{np.median(alone):.0f}", f"{np.median(beside):.0f}", str(ratio_of_sums(beside, alone)))
        )
    headings = ("of a draft", "alone, µs", "beside strangers, µs", "ratio")
    return ["## Drafts while strangers hold the ports", "", text, "", *table(headings, cells)]


def upkeep(record: dict) -> list[str]:
    build, merging, sessions = record["build"], record["merging"], record["sessions"]
    resident = sessions["resident_bytes"]
    sorting = (
        f"{build['tokens'] / MILLION:.1f} M", f"{build['bytes_per_token']:.2f}", f"{build['raw_seconds']:.2f}",
        f"{build['build_seconds']:.2f}", f"{build['ratio']:.2f}",
    )  # fmt: skip
    beside = ("quiet", "busy", "merging")
    steps = ((name, *(f"{merging[name][p]:.1f}" for p in ("p50", "p99"))) for name in beside)
    times = (f"{merging['merging']['p99'] / merging[other]['p99']:.2f}" for other in ("quiet", "busy"))
    open_and_closed = (
        sessions["sessions"], f"{sessions['bytes_per_token']:.1f}", f"{resident[0] / MILLION:.1f}",
        f"{resident[-1] / MILLION:.1f}",
    )  # fmt: skip
    return [
        "## Upkeep of the datastore", "",
        *table(("tokens", "bytes a token", "seconds to sort", "seconds to build", "build / sort"), [sorting]),
        *table(("beside", "step p50 µs", "p99 µs"), steps),
        "While segments merge, the 99th percentile is {} times that at rest and {} times that beside a busy thread.".format(*times),
        "",
        *table(("sessions opened and closed", "bytes a token", "MB after a tenth", "MB at the end"), [open_and_closed]),
    ]  # fmt: skip


def host_time(record: dict) -> list[str]:
    names = list(record["results"][0])
    labels, parts = names[:3], names[3:]
    cells = (
        (*(row[label] for label in labels), *(f"{row[part]:.2f}" for part in parts))
        for row in record["results"]
    )
    text = "Milliseconds on the host before the target's forward is launched, medians."
    return ["## Host time of a step", "", text, "", *table((*labels, *parts), cells)]


def roofline(record: dict) -> list[str]:
    settings, rows = record["manifest"]["settings"], record["results"]
    cells = (
        (
            row["batch"],
            f"{row['plain_ms']:.2f}",
            row["speculation_length"],
            *(f"{c:.2f}" for c in row["cost"].values()),
        )
        for row in rows
    )
    text = (
        f"A calculation, not a measurement (SSSD, appendix B): {settings['teraflops']} TFLOP/s, {settings['bandwidth']} TB/s,"
        f" context {settings['context']}. The ridge point is {record['ridge']:.0f} FLOPs a byte. Step time over plain decoding by"
        " rows of each request:"
    )
    headings = ("batch", "plain step, ms", "rows by the rule", *rows[0]["cost"])
    return ["## What verification costs on a GPU", "", text, "", *table(headings, cells)]
