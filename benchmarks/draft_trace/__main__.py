"""`python -m benchmarks.draft_trace`: the share of the draft's time that lies beside the target's, from recorded traces.

The same prompts go to a server that drafts while the target verifies, and to one whose draft process is told of a verification
only when its outcome is known (the forced-serial control). Both wait for the draft after a miss. Each trace is replayed, and the
run fails if the replay counts otherwise than the server did.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.draft_trace import events, tracing
from benchmarks.draft_trace.overlap import Share, shares, spoken, timeline
from benchmarks.draft_trace.replay import (
    Counts,
    LookedUp,
    counted_here,
    counts,
    replay_draft,
    replay_worker,
    since,
)
from benchmarks.emulated_latency import emulated_latency
from benchmarks.options import add_dtype, check_positive, options
from benchmarks.report.drafting import SERIAL
from benchmarks.report.records import finish
from benchmarks.report.statistics import ratio_of_sums
from benchmarks.traces import SHIPPED, recorded_rows
from sglang_patches.early_exit.adapter import EarlyExits
from sglang_patches.launch.metrics import samples
from sglang_patches.launch.servers import ServerSpec, SglangServer, exit_when_terminated, running

BESIDE = "beside the target"
STEPS = 6  # of the picture
QUIET_SECONDS = 3.0  # without new counts: everything is over
BEFORE, AFTER = 0.1, 0.35  # of a step, that the picture shows before its first and after its last


@dataclass(frozen=True)
class Load:
    """groups: nanoseconds from and to, of the prompts that were decoded together. tokens: emitted. counted: by the server."""

    groups: list[tuple[int, int]]
    tokens: int
    counted: Counts


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options("draft_trace", __doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True)
    add("--draft", type=Path, required=True)
    add("--early-exit", type=Path, help="file of the target's early exits: MIRROR in the place of SAGUARO")
    add("--early-exit-layer", type=int, nargs="+", default=[0], help="a server for each; 0: the middle one")
    add("--emulated-ms", type=float, help="that a forward of the target takes at least, by a sleep in it")
    add("--prompts", type=Path, default=SHIPPED, help="file of python -m benchmarks.record")
    add("--count", type=int, default=6, help="prompts")
    add("--batch", type=int, default=1, help="prompts that are decoded together")
    add("--max-tokens", type=int, default=48)
    add("--traces", type=Path, help="new folder to keep the traces in")
    add("--rows", type=int, default=8, help="of a draft forward, and outcomes guessed")
    add("--lookahead", type=int, default=4, help="tokens drafted after each guess, and verified")
    add_dtype(parser)
    given = parser.parse_args(argv)
    check_positive(parser, given, "count", "batch", "max_tokens", "rows", "lookahead")
    return given


@dataclass(frozen=True)
class Variant:
    """A server. exit_layer: layers below its early exit, of `layers`; 0 without one."""

    name: str
    serial: bool = False
    exit_layer: int = 0
    layers: int = 0


def variants(given: argparse.Namespace) -> list[Variant]:
    """The control is of the first exit. Raises ValueError for an exit that the file has not."""
    if not given.early_exit:
        return [Variant(BESIDE), Variant(SERIAL, True)]
    exits = EarlyExits.load(given.early_exit)
    found = [(exits.layer(wanted), exits.about.layers) for wanted in given.early_exit_layer]
    beside = [Variant(f"{BESIDE} from layer {layer} of {of}", False, layer, of) for layer, of in found]
    return [*beside, Variant(SERIAL, True, *found[0])]


def server_spec(given: argparse.Namespace, variant: Variant, folder: Path) -> ServerSpec:
    """folder: of its traces."""
    environments = [tracing(folder, variant.serial)]
    if given.emulated_ms:
        environments.append(emulated_latency(given.emulated_ms))
    merged = {name: value for each in environments for name, value in each.items()}
    merged["PYTHONPATH"] = os.pathsep.join(each["PYTHONPATH"] for each in environments)
    flags = {
        "--specstore-draft-rows": given.rows,
        "--specstore-draft-lookahead": given.lookahead,
        "--specstore-fallback": "draft",
        "--specstore-length": "static",
    }
    if given.early_exit:
        flags |= {
            "--specstore-early-exit": given.early_exit,
            "--specstore-early-exit-layer": variant.exit_layer,
        }
    words = [str(word) for flag in flags.items() for word in flag]
    return ServerSpec(
        folder.name,
        given.model,
        "MIRROR" if given.early_exit else "SAGUARO",
        given.dtype,
        given.lookahead,
        given.draft,
        flags=(*words, "--enable-metrics"),
        environment=merged | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"},
        max_running_requests=given.batch,
    )


def load(server: SglangServer, prompts: Sequence[Sequence[int]], given: argparse.Namespace) -> Load:
    """The first prompts warm the server up."""
    asked = {"temperature": 0, "max_new_tokens": given.max_tokens, "ignore_eos": True}
    server.generate_many(prompts[: given.batch], given.batch, **asked)
    groups, tokens = [], 0
    for start in range(given.batch, len(prompts), given.batch):
        began = events.now()
        answers = server.generate_many(prompts[start : start + given.batch], given.batch, **asked)
        groups.append((began, events.now()))
        tokens += sum(len(answer["output_ids"]) for answer in answers)
    return Load(groups, tokens, settled_counts(server))


def settled_counts(server: SglangServer) -> Counts:
    """Once they stay as they are."""
    found = counts(samples(server.url))
    while True:
        time.sleep(QUIET_SECONDS)
        before, found = found, counts(samples(server.url))
        if before == found:
            return found


@dataclass(frozen=True)
class Recorded:
    """Of one server, with its look-ups as replayed."""

    worker: list[events.Event]
    draft: list[events.Event]
    looked_up: list[LookedUp]


def replayed_alike(folder: Path, counted: Counts) -> Recorded:
    """Exits if the replay counts otherwise."""
    (worker,), (draft,) = (
        [events.read(path) for path in folder.glob(f"{process}-*.jsonl")] for process in ("worker", "draft")
    )
    before = counted_here()
    looked_up = replay_worker(worker)
    replay_draft(draft)
    again = since(before)
    if again != counted:
        different = {key: (counted.get(key), again.get(key)) for key in counted.keys() | again.keys()}
        lines = [f"{key}: {one} and {two}" for key, (one, two) in sorted(different.items()) if one != two]
        sys.exit("error: the server's counts and the replay's differ:\n" + "\n".join(lines))
    return Recorded(worker, draft, looked_up)


def row_of(variant: Variant, done: Load, recorded: Recorded) -> dict:
    found = shares(recorded.worker, recorded.draft)
    groups = [[share for share in found if begin <= share.at < end] for begin, end in done.groups]
    steps = [share for group in groups for share in group]
    drafted = [share.hidden / share.busy for share in steps if share.busy]
    return {
        "variant": variant.name,
        "hidden": ratio_of_sums(*(_sums(groups, name) for name in ("hidden", "busy"))),
        "hidden_by_step": [float(np.percentile(drafted, at)) for at in (10, 50, 90)],
        "exit": exit_row(variant, done, recorded) if variant.exit_layer else None,
        "waiting": sum(share.waited for share in steps) / 1e9 / sum(share.seconds for share in steps),
        "step_ms": 1e3 * float(np.median([share.seconds for share in steps])),
        "target_ms": _median_ms(
            [e for e in recorded.worker if isinstance(e, events.Forward) and e.width > 1]
        ),
        "draft_ms": _median_ms(
            [e.forward for e in recorded.draft if isinstance(e, events.Worked) and e.forward]
        ),
        "steps": len(steps),
        "tokens": done.tokens,
        "seconds": sum(end - begin for begin, end in done.groups) / 1e9,
        "counted": done.counted,
    }


def exit_row(variant: Variant, done: Load, recorded: Recorded) -> dict:
    """When the early exit spoke: quartiles of the shares of its verifications. The warm-up does not count."""
    found = [
        spoke
        for spoke in spoken(recorded.worker, recorded.draft)
        if any(begin <= spoke.at < end for begin, end in done.groups)
    ]
    return {
        "layer": variant.exit_layer,
        "layers": variant.layers,
        "verifications": len(found),
        "posted": _quartiles([spoke.posted for spoke in found]),
        "heard": _quartiles([spoke.heard for spoke in found]),
    }


def _quartiles(values: Sequence[float]) -> list[float]:
    return [float(np.percentile(values, at)) for at in (25, 50, 75)]


def _sums(groups: Sequence[Sequence[Share]], name: str) -> list[float]:
    return [float(sum(getattr(share, name) for share in group)) for group in groups]


def _median_ms(forwards: Sequence[events.Forward | events.DraftForward]) -> float:
    return float(np.median([forward.at - forward.began for forward in forwards])) / 1e6


def picture(done: Load, recorded: Recorded) -> list[dict]:
    """Of the steps with the most kinds of look-ups, the first of those."""
    begins = [
        share.at
        for share in shares(recorded.worker, recorded.draft)
        if any(begin <= share.at < end for begin, end in done.groups)
    ]
    starts = range(max(1, len(begins) - STEPS))
    first = max(starts, key=lambda at: (_kinds(recorded.looked_up, begins[at : at + STEPS]), -at))
    step = begins[first + 1] - begins[first]
    last = begins[min(first + STEPS, len(begins)) - 1]
    window = begins[first] - int(BEFORE * step), last + int((1 + AFTER) * step)
    return timeline(recorded.worker, recorded.draft, recorded.looked_up, window)


def _kinds(looked_up: Sequence[LookedUp], begins: Sequence[int]) -> int:
    return len({kind for one in looked_up if begins[0] <= one.at <= begins[-1] for kind in one.results})


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    exit_when_terminated()
    prompts = [row["prompt_tokens"] for row in recorded_rows(given.prompts)]
    chosen = [
        prompts[at * len(prompts) // (given.count + given.batch)] for at in range(given.count + given.batch)
    ]
    rows, pictures = [], []
    with tempfile.TemporaryDirectory(prefix="draft-trace-") as parent:
        for variant in variants(given):
            folder = (given.traces or Path(parent)) / variant.name.replace(" ", "-")
            folder.mkdir(parents=True)
            with running(server_spec(given, variant, folder), folder) as server:
                done = load(server, chosen, given)
            recorded = replayed_alike(folder, done.counted)
            rows.append(row_of(variant, done, recorded))
            pictures.append({"variant": variant.name, "timeline": picture(done, recorded)})
    finish("draft_trace", given, [given.prompts], results=rows, timelines=pictures)


if __name__ == "__main__":
    main()
