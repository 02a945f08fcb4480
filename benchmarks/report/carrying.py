"""Tables of what one datastore service carries."""

from __future__ import annotations

from benchmarks.report.markdown import table

MIB = 1 << 20
MOMENTS = 10  # of a run, that the table of its memory has


def load(record: dict) -> list[str]:
    settings = record["manifest"]["settings"]
    text = (
        f"{settings['streams']} streams with {settings['sessions']:,} sessions in all, {settings['nodes']} nodes a session and step,"
        f" answers unused after {settings['deadline_ms']:g} ms. The rate is of steps a second of each stream, a step being one"
        " message for all its sessions. A latency is what an engine waits for a step. Late is by how much a step was sent after"
        " it was due, which is the clients' own delay: where it is not small against the latency, the clients were short of"
        " processors too."
    )
    return [
        "## What one datastore service carries", "", text, "", *_steps(record["levels"]), *_resources(record["levels"]),
        *_limit(record), *_over_time(record["samples"]),
    ]  # fmt: skip


def _steps(levels: list[dict]) -> list[str]:
    headings = (
        "rate", "taken", "p50 ms", "p99 ms", "p99.9 ms", "longest ms", "late p99 ms", "steps/s", "tokens/s",
        "tokens a session and step", "missed deadlines", "entries refused", "calls refused", "streams lost",
    )  # fmt: skip
    cells = (
        (
            f"{row['rate']:.1f}", f"{row['achieved']:.1f}", f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}",
            f"{row['p999_ms']:.2f}", f"{row['longest_ms']:.1f}", f"{row['late_p99_ms']:.2f}",
            f"{row['steps_per_second']:.0f}", f"{row['tokens_per_second']:.0f}", f"{row['tokens_per_step']:.2f}",
            f"{row['missed']} of {row['steps']}", _refused(row["refused"]), f"{row['refused_calls']:.0f}", row["broken"],
        )
        for row in levels
    )  # fmt: skip
    return table(headings, cells)


def _refused(by_status: dict) -> str:
    return ", ".join(f"{count} {status}" for status, count in by_status.items()) or "0"


def _resources(levels: list[dict]) -> list[str]:
    headings = (
        "rate", "service, ms a message", "of it engine", "service, processors", "clients, processors", "machine busy",
        "sessions", "live-tier rebuilds", "resident MiB: first", "last", "most",
    )  # fmt: skip
    cells = (
        (
            f"{row['rate']:.1f}", f"{row['service_ms']:.2f}", f"{row['service_engine_ms']:.2f}", f"{row['service_cores']:.2f}",
            f"{row['client_cores']:.2f}", f"{row['machine_busy']:.0%} of {row['cores']}", row["sessions"], row["rebuilds"],
            *(f"{row[f'resident_{when}'] / MIB:.0f}" for when in ("first", "last", "most")),
        )
        for row in levels
    )  # fmt: skip
    return table(headings, cells)


def _limit(record: dict) -> list[str]:
    """Of a run that looked for it."""
    limit, levels = record["limit"], record["levels"]
    if not limit:
        return []
    if not limit["beyond"]:
        return [f"No limit was found up to {levels[-1]['rate']:.1f} steps a second of each stream.", ""]
    last = levels[-1]["rate"]
    held = next((level for level in reversed(levels) if level["rate"] < last), None)
    carried = (
        f"carries {held['rate']:.1f} steps a second of each stream ({held['tokens_per_second']:.0f} tokens a second)"
        if held
        else "does not carry the lowest rate that was offered"
    )
    return [
        f"It {carried}. At {last:.1f}, twice in turn: {limit['beyond']}. The resource at its end: {limit['exhausted']}.",
        "",
    ]


def _over_time(samples: list[dict]) -> list[str]:
    if not samples:
        return []
    chosen = [samples[round(at * (len(samples) - 1) / MOMENTS)] for at in range(MOMENTS + 1)]
    cells = (
        (
            f"{sample['seconds'] / 60:.1f}", f"{sample['resident_bytes'] / MIB:.0f}", f"{sample['live_tokens']:,}",
            sample["live_segments"], sample["segments_written"],
        )
        for sample in chosen
    )  # fmt: skip
    return table(
        ("minute", "resident MiB", "tokens of the live tier", "its segments", "segments written so far"),
        cells,
    )
