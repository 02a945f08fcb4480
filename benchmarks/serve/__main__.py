"""`python -m benchmarks.serve`: throughput and latency of real servers, against plain decoding in the same run.

Prompts are recorded ones (benchmarks.record), whose answers also predict each figure before it is measured. Each group's
prompts are prefilled first, then a steady load decodes them from the cached prefix: results are decode throughput with
a full batch. Pilot loads before that are the first to measure every server's step times.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.options import NEEDED, Parser, add_dtype, number
from benchmarks.replay.methods import Corpus
from benchmarks.report.records import JOURNAL, Journal, finish, manifest
from benchmarks.serve.cases import CASES, Case, Pool, pilots
from benchmarks.serve.measure import bench_serving, measure, points, run
from benchmarks.serve.prediction import Forecasts, Recent, merged
from benchmarks.serve.summary import summarised
from benchmarks.serve.tables import BASELINE
from benchmarks.serve.variants import (
    VARIANTS,
    WITH_DRAFT,
    WITH_HEAD,
    Settings,
    prepare,
    server_spec,
    services,
)
from benchmarks.traces import SHIPPED, SHIPPED_PRIOR, load_traces, recorded_rows
from tests.support.servers.engine import SglangServer, exit_when_terminated, running

WARM_UP_TOKENS = 24

Pilots = dict[tuple[str, int, str], list[dict]]  # records by variant, batch size and name of the load


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("serve", __doc__, "var/serve.json")
    add = parser.add
    add("--model", None, "folder of the model", **NEEDED)
    add("--prompts", [SHIPPED], "files of python -m benchmarks.record")
    add("--prior", [SHIPPED_PRIOR], "recorded answers to other prompts")
    servers = (
        "a server each, all at once: 4.6 GB of memory with the demo model (float32 6.5), 2 GB more for NGRAM"
    )
    add("--variants", ["plain", "ngram", "sssd", "control_adaptive"], servers, choices=VARIANTS)
    add("--draft", None, f"draft model of {', '.join(WITH_DRAFT)}", type=Path)
    add("--head", None, f"EAGLE-3 head of {' and '.join(WITH_HEAD)}", type=Path)
    add("--cases", ["mixed"], "what is asked", choices=CASES)
    add("--batch", [1, 8], "requests at once, of the case mixed")
    add("--case-batch", [], "of the other cases; as --batch if left out", type=number(1))
    add("--count", 16, "prompts of a case (of tasks: a category) and batch size, at least for three groups")
    add("--nodes", 15, "drafted tokens a tree (the root is one row more)")
    add(
        "--bench-serving",
        0,
        "also load with sglang.bench_serving, so many prompts a batch size",
        metavar="PROMPTS",
    )
    add("--max-tokens", 128, "of an answer")
    add_dtype(parser)
    add("--seed", 0, "of the order of prompts")
    given = parser.parse_args(argv)
    given.case_batch = given.case_batch or given.batch
    if BASELINE not in given.variants:
        parser.error(f"--variants: {BASELINE} is what the others are compared with")
    for word, names in {"draft": WITH_DRAFT, "head": WITH_HEAD}.items():
        if getattr(given, word) is None and (needed := set(names) & set(given.variants)):
            parser.error(f"--{word}: {', '.join(sorted(needed))} cannot do without")
    return given


def chosen_cases(given: argparse.Namespace, pool: Pool) -> list[Case]:
    """Exits where no group of a case could be filled."""
    cases = []
    for name in given.cases:
        cases.append(CASES[name](pool, given.batch if name == "mixed" else given.case_batch, given.count))
        empty = [batch for batch, groups in cases[-1].groups.items() if not groups]
        if empty:
            sys.exit(f"--cases {name}: --prompts hold too few for batch {empty[0]}")
    for batch, categories in left_out(cases, pool.categories()).items():
        print(f"tasks at batch {batch}: too few prompts of {', '.join(categories)}", file=sys.stderr)
    return cases


def left_out(cases: Sequence[Case], categories: Sequence[str]) -> dict[int, list[str]]:
    """By batch size the categories which had too few prompts for a group of tasks, where there are any."""
    missing = {}
    for case in (case for case in cases if case.name == "tasks"):
        for batch, groups in case.groups.items():
            asked = {group[0].category for group in groups}
            missing[batch] = [category for category in categories if category not in asked]
    return {batch: names for batch, names in missing.items() if names}


def warm_up(servers: Sequence[SglangServer], prompts: Sequence[Sequence[int]], batch: int) -> None:
    """One prompt alone first, so that every server computes the KV of the chat template's beginning, which all prompts share,
    in a prefill of the same shape: in bfloat16 its last bits depend on that."""
    for server in servers:
        server.generate(prompts[0], temperature=0, max_new_tokens=1)
        server.generate_many(list(prompts), batch, temperature=0, max_new_tokens=WARM_UP_TOKENS)


def forecasts(given: argparse.Namespace, piloted: Pilots, corpus: Corpus) -> Forecasts:
    rows = {variant: 1 if variant == BASELINE else given.nodes + 1 for variant, *_ in piloted}
    recent = {
        (variant, batch): Recent(loads, merged(piloted[variant, batch, "long pilot"]), batch, rows[variant])
        for (variant, batch, load), loads in piloted.items()
        if load == "pilot"
    }
    return Forecasts(recent, given.nodes, corpus, given.max_tokens)


def started(
    given: argparse.Namespace, settings: Settings, unused: int, folder: Path, stack: contextlib.ExitStack
) -> tuple[dict[str, SglangServer], dict[str, int]]:
    """A healthy server a variant, and the services they draft from, all of which are stopped with the stack; and by variant the
    port of its service's metrics."""
    knowledge = prepare(given.variants, given.prior, given.model / "tokenizer.json", folder)
    ports = stack.enter_context(services(given.variants, knowledge, unused, folder))
    servers = {
        variant: stack.enter_context(running(server_spec(variant, settings, knowledge, ports), folder))
        for variant in given.variants
    }
    return servers, {"sssd_grpc": ports["metrics"]} if "metrics" in ports else {}


def pilot_loads(
    servers: dict[str, SglangServer], loads: Sequence[Case], max_tokens: int, journal: Journal
) -> Pilots:
    """In rounds of all loads, batch sizes and servers: the pace of a shared machine changes within minutes."""
    largest = max(loads[0].groups)
    first = loads[0].groups[largest][0]
    warm_up(list(servers.values()), [request.prompt for request in first], largest)
    records: Pilots = {}
    for point in sorted(points(loads), key=lambda point: point.index):
        for variant, server in servers.items():
            record = measure(server, point.group, point.batch, max(1, max_tokens // 2), point.case)
            journal.add("pilot", {"variant": variant, "batch": point.batch, "case": point.case.name} | record)
            records.setdefault((variant, point.batch, point.case.name), []).append(record)
    return records


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    from transformers import AutoTokenizer

    exit_when_terminated()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    unused_token = next(token for token in tokenizer.all_special_ids if token != tokenizer.eos_token_id)
    pool = Pool([row for file in given.prompts for row in recorded_rows(file)], tokenizer, given.seed)
    batches = sorted({*given.batch, *given.case_batch})
    loads = pilots(pool, batches)
    cases = chosen_cases(given, pool)
    corpus = Corpus([trace.output for trace in load_traces(*given.prior)], vocab_size=len(tokenizer))
    settings = Settings(given.model, given.draft, given.head, given.dtype, given.nodes, tuple(batches))
    files = [*given.prompts, *given.prior]
    path = given.json.with_suffix(JOURNAL)
    journal = Journal(path, manifest("serve", files, given))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-serve-")))
        servers, ports = started(given, settings, unused_token, folder, stack)
        piloted = pilot_loads(servers, loads, given.max_tokens, journal)
        progress = track(list(points(cases)), "groups", console=Console(stderr=True))
        run(servers, ports, progress, forecasts(given, piloted, corpus), given.max_tokens, journal)
        for batch in given.case_batch if given.bench_serving else ():
            group = pool.take(given.bench_serving)  # that no server has answered
            for variant, server in servers.items():
                row = bench_serving(server, group, tokenizer, batch, given.max_tokens, folder)
                journal.add("bench_serving", {"batch": batch, "variant": variant} | row)
    results = {name: of for name, of in summarised(path).items() if name != "manifest"}
    finish("serve", given, files, **results)


if __name__ == "__main__":
    main()
