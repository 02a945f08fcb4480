"""Tables of what one datastore service carries."""

from __future__ import annotations

from benchmarks.report.markdown import columns

MIB = 1 << 20
MOMENTS = 10  # of a run, that the table of its memory has
STEPS = {
    "rate": "{rate:.1f}", "taken": "{achieved:.1f}", "p50 ms": "{p50_ms:.2f}", "p99 ms": "{p99_ms:.2f}",
    "p99.9 ms": "{p999_ms:.2f}", "longest ms": "{longest_ms:.1f}", "late p99 ms": "{late_p99_ms:.2f}",
    "steps/s": "{steps_per_second:.0f}", "tokens/s": "{tokens_per_second:.0f}",
    "tokens a session and step": "{tokens_per_step:.2f}", "missed deadlines": "{missed} of {steps}",
    "entries refused": lambda row: ", ".join(f"{count} {of}" for of, count in row["refused"].items()) or "0",
    "calls refused": "{refused_calls:.0f}", "streams lost": "{broken}",
}  # fmt: skip
RESOURCES = {
    "rate": "{rate:.1f}", "service, ms a message": "{service_ms:.2f}", "of it engine": "{service_engine_ms:.2f}",
    "service, processors": "{service_cores:.2f}", "clients, processors": "{client_cores:.2f}",
    "machine busy": "{machine_busy:.0%} of {cores}", "sessions": "{sessions}", "live-tier rebuilds": "{rebuilds}",
    "resident MiB: first": lambda row: f"{row['resident_first'] / MIB:.0f}",
    "last": lambda row: f"{row['resident_last'] / MIB:.0f}", "most": lambda row: f"{row['resident_most'] / MIB:.0f}",
}  # fmt: skip
OVER_TIME = {
    "minute": lambda sample: f"{sample['seconds'] / 60:.1f}",
    "resident MiB": lambda sample: f"{sample['resident_bytes'] / MIB:.0f}",
    "tokens of the live tier": "{live_tokens:,}", "its segments": "{live_segments}",
    "segments written so far": "{segments_written}",
}  # fmt: skip


def load(record: dict) -> list[str]:
    settings, samples = record["manifest"]["settings"], record["samples"]
    text = (
        f"{settings['streams']} streams with {settings['sessions']:,} sessions in all, {settings['nodes']} nodes a session and step,"
        f" answers unused after {settings['deadline_ms']:g} ms. The rate is of steps a second of each stream, a step being one"
        " message for all its sessions. A latency is what an engine waits for a step. Late is by how much a step was sent after"
        " it was due, which is the clients' own delay: where it is not small against the latency, the clients were short of"
        " processors too."
    )
    moments = (
        [samples[round(at * (len(samples) - 1) / MOMENTS)] for at in range(MOMENTS + 1)] if samples else []
    )
    return [
        "## What one datastore service carries", "", text, "",
        *columns(record["levels"], STEPS), *columns(record["levels"], RESOURCES), *_limit(record),
        *(columns(moments, OVER_TIME) if moments else []),
    ]  # fmt: skip


def _limit(record: dict) -> list[str]:
    """What a search for the limit found; empty where there was none."""
    limit, levels = record["limit"], record["levels"]
    if not limit:
        return []
    last = levels[-1]["rate"]
    if not limit["beyond"]:
        return [f"No limit was found up to {last:.1f} steps a second of each stream.", ""]
    held = next((level for level in reversed(levels) if level["rate"] < last), None)
    carried = "does not carry the lowest rate that was offered"
    if held:
        carried = f"carries {held['rate']:.1f} steps a second of each stream ({held['tokens_per_second']:.0f} tokens a second)"
    beyond = (
        f"At {last:.1f}, twice in turn: {limit['beyond']}. The resource at its end: {limit['exhausted']}."
    )
    return [f"It {carried}. {beyond}", ""]
