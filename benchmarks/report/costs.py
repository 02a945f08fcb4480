"""Tables of the benchmarks that ask what one part costs."""

from __future__ import annotations

import numpy as np

from benchmarks.report.markdown import in_order, table
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


def length(record: dict) -> list[str]:
    cells = (
        (category, f"{best:.2f}", f"{np.mean(learned):.2f}", f"{min(learned):.2f}")
        for category, best in record["known"].items()
        for learned in [[run[category] for run in record["runs"]]]
    )
    text = "Simulated throughput over plain decoding."
    headings = ("category", "step times known", "learned: mean", "worst")
    return ["## Choice of the speculation length", "", text, "", *table(headings, cells)]


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


def split_latency(record: dict) -> list[str]:
    cells = (
        (
            row["stack"], row["phase"], len(gaps), *(f"{np.percentile(gaps, p):.0f}" for p in (50, 90, 99, 100)),
            f"{row['long_prompt_p50_s']:.1f}",
        )
        for row in record["results"]
        for gaps in [np.concatenate(row["gaps_ms"])]
    )  # fmt: skip
    headings = (
        "stack",
        "phase",
        "gaps",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "longest ms",
        "a long prompt's first token, median s",
    )
    return [
        "## Time between two chunks of an answer",
        "",
        *table(headings, cells),
        *_by_round(record["results"]),
    ]


def _by_round(rows: list[dict]) -> list[str]:
    phase = in_order(rows, "phase")[-1]
    one, two = ([np.percentile(gaps, 99) for gaps in row["gaps_ms"]] for row in rows if row["phase"] == phase)
    ratios = ", ".join(f"{a / b:.1f}" for a, b in zip(one, two, strict=True))
    return [f"99th percentile of one instance over that of two, {phase}, by round: {ratios}.", ""]


def weights(record: dict) -> list[str]:
    cells = ((name, *(f"{value:.4f}" for value in record[name].values())) for name in ("before", "after"))
    found = (f"- {name}: {value}" for name, value in record["weights"].items())
    return [
        "## Constants of `weighted` fusion",
        "",
        *table(("", "tokens a step", "error"), cells),
        *found,
        "",
    ]
