"""Tables of the benchmarks that ask what one part costs, and what one datastore service carries."""

from __future__ import annotations

import numpy as np

from benchmarks.report.markdown import columns, interval, table
from benchmarks.report.statistics import Interval, ratio_of_sums

MIB = 1 << 20
MOMENTS = 10  # of a run, that the table of its memory has
STEPS = {
    "rate": "{rate:.1f}", "taken": "{achieved:.1f}", "p50 ms": "{p50_ms:.2f}", "p99 ms": "{p99_ms:.2f}",
    "p99.9 ms": "{p999_ms:.2f}", "longest ms": "{longest_ms:.1f}", "late p99 ms": "{late_p99_ms:.2f}",
    "steps/s": "{steps_per_second:.0f}", "tokens/s": "{tokens_per_second:.0f}",
    "tokens per session and step": "{tokens_per_step:.2f}", "missed deadlines": "{missed} of {steps}",
    "entries refused": lambda row: ", ".join(f"{count} {of}" for of, count in row["refused"].items()) or "0",
    "calls refused": "{refused_calls:.0f}", "streams lost": "{broken}",
}  # fmt: skip
RESOURCES = {
    "rate": "{rate:.1f}", "service, ms per message": "{service_ms:.2f}", "of it engine": "{service_engine_ms:.2f}",
    "service, processors": "{service_cores:.2f}", "clients, processors": "{client_cores:.2f}",
    "machine busy": "{machine_busy:.0%} of {cores}", "sessions": "{sessions}", "live-tier rebuilds": "{rebuilds}",
    "resident MiB: first": lambda row: f"{row['resident_first'] / MIB:.0f}",
    "last": lambda row: f"{row['resident_last'] / MIB:.0f}", "most": lambda row: f"{row['resident_most'] / MIB:.0f}",
}  # fmt: skip
REBUILT = {
    "outputs in the backup": "{outputs}", "and after it": "{later}", "tokens": "{tokens:,}", "restored, s": "{restored:.2f}",
    "serving after, s": "{serving:.2f}", "all of it after, s": "{caught_up:.2f}",
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
        f"{settings['streams']} streams with {settings['sessions']:,} sessions in all, {settings['nodes']} nodes per session and step,"
        f" answers unused after {settings['deadline_ms']:g} ms. The rate is of steps per second of each stream, a step being one"
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
        return [f"No limit was found up to {last:.1f} steps per second of each stream.", ""]
    held = next((level for level in reversed(levels) if level["rate"] < last), None)
    carried = "does not carry the lowest rate that was offered"
    if held:
        carried = f"carries {held['rate']:.1f} steps per second of each stream ({held['tokens_per_second']:.0f} tokens per second)"
    beyond = f"At {last:.1f}, twice in turn: {limit['beyond']}. Saturated: {limit['exhausted']}."
    return [f"It {carried}. {beyond}", ""]


MILLION = 1e6
ENGINE = {
    "corpus": lambda r: f"{r['prior_tokens'] / MILLION:.1f} M",
    "bytes per token": lambda r: f"{r['prior_bytes'] / r['prior_tokens']:.2f}", "seconds to build": "{build_seconds:.1f}",
    "batch": "{batch}", "nodes": "{nodes}", "steps": "{steps}", "p50 µs": "{p50_us:.1f}", "p99 µs": "{p99_us:.1f}",
    "tokens per step": "{tokens_per_step:.2f}",
}  # fmt: skip
BUILD = {
    "tokens": lambda build: f"{build['tokens'] / MILLION:.1f} M", "bytes per token": "{bytes_per_token:.2f}",
    "seconds to sort": "{raw_seconds:.2f}", "seconds to build": "{build_seconds:.2f}", "build / sort": "{ratio:.2f}",
}  # fmt: skip
BACKUP = {
    "tokens": "{tokens:,}", "bytes": "{bytes:,}", "backup, s": "{backup_seconds:.2f}", "one more, bytes": "{second_bytes:,}",
    "s": "{second_seconds:.2f}", "restore, s": "{restore_seconds:.2f}", "start, s": "{start_seconds:.2f}",
}  # fmt: skip
SESSIONS = {
    "sessions opened and closed": "{sessions}", "bytes per token": "{bytes_per_token:.1f}",
    "MB after a tenth": lambda sessions: f"{sessions['resident_bytes'][0] / MILLION:.1f}",
    "MB at the end": lambda sessions: f"{sessions['resident_bytes'][-1] / MILLION:.1f}",
}  # fmt: skip


def engine(record: dict) -> list[str]:
    text = "One step of the engine in one thread: session, live tier and corpus."
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
    noisy, messages = settings.get("noisy", 0), settings.get("messages", 0)
    whom = f"{noisy} workers of a noisy tenant" if noisy else "strangers"
    quota = f", whose quota is {messages} messages a second," if messages else ""
    text = f"{len(rows)} rounds with {whom}{quota} and as many without, at batch {settings['batch']}."
    cells = []
    for share, name in ((50, "median"), (99, "99th percentile")):
        alone, beside = ([row[f"{which}_{share}"] for row in rows] for which in ("alone", "beside"))
        cells.append(
            (name, f"{np.median(alone):.0f}", f"{np.median(beside):.0f}", ratio_of_sums(beside, alone))
        )
    headings = ("of a draft", "alone, µs", "beside strangers, µs", "ratio")
    return ["## Drafts while strangers hold the ports", "", text, "", *table(headings, cells)]


def sharing(record: dict) -> list[str]:
    seconds, rows = [row["seconds"] for row in record["seconds"]], record["steps"]
    drafts = {
        "services": "{services}", "asked": "{asked}", "tokens per step": "{per_step:.3f}",
        "over one service's": lambda row: "{value:.3f} [{low:.3f}, {high:.3f}]".format(**row),
    }  # fmt: skip
    cells = []
    for share, name in ((50, "median"), (99, "99th percentile")):
        shared, alone = ([row[f"{which}_{share}"] for row in rows] for which in ("sharing", "alone"))
        cells.append(
            (name, f"{np.median(alone):.0f}", f"{np.median(shared):.0f}", ratio_of_sums(shared, alone))
        )
    text = "An output is drafted at another service after {:.2f} s (median) and {:.2f} s (the longest of {})."
    return [
        "## Several services, one memory", "", *columns(record["drafts"], drafts), "",
        text.format(float(np.median(seconds)), max(seconds), len(seconds)), "",
        *table(("of a step", "not sharing, µs", "sharing, µs", "ratio"), cells), "",
        *(columns(record["rebuilt"], REBUILT) if "rebuilt" in record else ()),
    ]  # fmt: skip


def upkeep(record: dict) -> list[str]:
    merging = record["merging"]
    steps = [{"beside": name, **merging[name]} for name in ("quiet", "busy", "merging")]
    times = (f"{merging['merging']['p99'] / merging[other]['p99']:.2f}" for other in ("quiet", "busy"))
    text = "While segments merge, the 99th percentile is {} times that at rest and {} times that beside a busy thread."
    return [
        "## Upkeep of the datastore", "", *columns([record["build"]], BUILD),
        *columns(steps, {"beside": "{beside}", "step p50 µs": "{p50:.1f}", "p99 µs": "{p99:.1f}"}),
        text.format(*times), "", *columns([record["sessions"]], SESSIONS),
        *(columns([record["backup"]], BACKUP) if "backup" in record else ()),
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
        f" context {settings['context']}. The ridge point is {record['ridge']:.0f} FLOPs per byte. Step time over plain decoding by"
        " rows of each request:"
    )
    cells = {
        "batch": "{batch}",
        "plain step, ms": "{plain_ms:.2f}",
        "rows by the rule": "{speculation_length}",
    }
    cost = {length: lambda row, length=length: f"{row['cost'][length]:.2f}" for length in rows[0]["cost"]}
    return ["## What verification costs on a GPU", "", text, "", *columns(rows, cells | cost)]


def predictions(record: dict) -> list[str]:
    settings = record["manifest"]["settings"]
    text = (
        f"{settings['texts']} texts of {settings['tokens']} tokens, one request at a time, {settings['dtype']}. The prediction is the answer with"
        " words changed, or another answer."
    )
    shown = {
        "prediction": "{way}", "tokens per step": lambda row: interval(row["tokens_per_step"]),
        "throughput over none": lambda row: interval(row["over_none"]),
    }  # fmt: skip
    return ["## Predictions", "", text, "", *columns(record["results"], shown)]


def agent(record: dict) -> list[str]:
    settings = record["manifest"]["settings"]
    text = (
        f"{settings['tasks']} tasks of {settings['turns']} turns, answers of at most {settings['tokens']} tokens, one request at a time,"
        f" {settings['dtype']}. Brackets are 95% intervals over tasks."
    )
    shown = {
        "way": "{way}", "tokens per step": lambda row: interval(row["tokens_per_step"]),
        "decoding over plain": lambda row: interval(row["decoding"]), "answers over plain": lambda row: interval(row["answers"]),
        "tasks with plain's tokens": "{same:.0%}",
    }  # fmt: skip
    return ["## An agent's loop", "", text, "", *columns(record["results"], shown)]


def rollouts(record: dict) -> list[str]:
    text = "Steps of real servers, then replays on a virtual clock: tokens per step, verified rows a token, speed over plain decoding."
    served = {
        "epoch": "{epoch}",
        "reward": "{reward:.3f}",
        "plain steps": "{plain_steps}",
        "steps": "{steps}",
    }
    replayed = {
        "weights": "{weights}", "group": "{group}", "older text": "{text}", "epoch": "{epoch}",
        "tokens/step": "{tokens_per_step:.2f}", "rows/token": "{rows_per_token:.2f}", "over plain": "{over_plain:.3f}",
    }  # fmt: skip
    return [
        "## Rollouts",
        "",
        text,
        "",
        *columns(record["served"], served),
        *columns(record["replayed"], replayed),
    ]


def rows(record: dict) -> list[str]:
    settings = record["manifest"]["settings"]
    text = (
        f"{settings['known']:.0%} of a batch's answers are known to the datastore. Tokens per second on a virtual clock that is a GPU's"
        f" roofline ({settings['teraflops']:g} TFLOP/s, {settings['bandwidth']:g} TB/s), {settings['groups']} groups, 95% intervals."
    )
    shown = {
        "batch": "{batch}", "": "{of}", "over": "{over}", "ratio": lambda row: str(Interval(row["value"], row["low"], row["high"])),
    }  # fmt: skip
    return ["## Rows by request", "", text, "", *columns(record["results"], shown)]
