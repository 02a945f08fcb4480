"""`python -m benchmarks.serve`: plain decoding, SGLang's NGRAM and SSSD on real servers, in one interleaved run.

Every prompt group goes to every server in turn, the order rotating from group to group, so that a slow minute of the
machine hits all of them. Each group's prompts are prefilled first (one token), then a steady load (benchmarks.load)
decodes them from the cached prefix: the figure is decode throughput with a full batch; the prefill's time is recorded
beside it. NGRAM and SSSD learn from what they have answered, so no prompt is asked twice (but with --seen): each batch
size has prompts of its own.

Arms: `sssd` chooses the rows of each step; `sssd_static` always verifies the whole node budget, as NGRAM does, to
compare drafts at equal budgets; `control` does so with drafts that never match; `control_adaptive` chooses the rows of
each step for drafts that never match: what the plugin costs where it cannot help.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.load import prompts_for, steady_load
from benchmarks.manifest import manifest
from benchmarks.prompts import SHIPPED, Prompt, chat_ids, load_prompts, spec_bench_category
from benchmarks.servers import ServerSpec, SglangServer, running
from benchmarks.statistics import as_json, ratio_of_sums, throughput_ratio
from sglang_patches.demo.processes import Child, free_port

BASELINE = "plain"
ARMS = ("plain", "ngram", "sssd", "sssd_static", "sssd_grpc", "control", "control_adaptive")
WARM_UP_PROMPTS = 2


@dataclass(frozen=True)
class Settings:
    model: Path
    dtype: str
    nodes: int
    batches: tuple[int, ...]
    max_tokens: int
    temperature: float
    endpoint: str
    prior: str
    overlap: bool
    seen: bool


def arm_spec(arm: str, settings: Settings, control_port: int) -> ServerSpec:
    """The server of one arm."""
    prior = ("--specstore-prior", settings.prior) if settings.prior else ()
    control = ("--specstore-endpoint", f"127.0.0.1:{control_port}")
    flags: dict[str, tuple[str, ...]] = {
        "sssd": prior,
        "sssd_static": (*prior, "--specstore-length", "static"),
        "sssd_grpc": ("--specstore-endpoint", settings.endpoint),
        "control": (*control, "--specstore-length", "static"),
        "control_adaptive": control,
    }
    algorithm = {"plain": None, "ngram": "NGRAM"}.get(arm, "SSSD")
    return ServerSpec(
        arm,
        settings.model,
        algorithm,
        settings.dtype,
        settings.nodes,
        flags=flags.get(arm, ()),
        max_running_requests=max(settings.batches),
        overlap=settings.overlap,
    )


@contextlib.contextmanager
def control_service(port: int, token: int, folder: Path) -> Iterator[None]:
    words = [sys.executable, "-m", "benchmarks.never_matching", "--port", str(port), "--token", str(token)]
    child = Child("control-service", words, {}, folder / "control-service.log", show=False)
    try:
        yield
    finally:
        child.stop()


def groups_of(prompts: Sequence[Prompt], batch: int) -> list[list[Prompt]]:
    """Groups of one category, each enough for a steady load of `batch`; a category's remainder is left out."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    size = prompts_for(batch)
    return [
        rows[start : start + size]
        for rows in by_category.values()
        for start in range(0, len(rows) - size + 1, size)
    ]


def measure(server: SglangServer, ids: list[list[int]], batch: int, settings: Settings) -> dict:
    """Prefill (with --seen, a first complete answer), then the timed generation of one group on one server."""
    started = time.perf_counter()
    untimed = settings.max_tokens if settings.seen else 1
    server.generate_many(ids, batch, max_new_tokens=untimed, temperature=settings.temperature)
    prefilled = time.perf_counter()
    load = steady_load(
        server, ids, batch, max_new_tokens=settings.max_tokens, temperature=settings.temperature
    )
    return {
        "prefill_seconds": prefilled - started,
        "seconds": load.seconds,
        "tokens": load.produced,
        "decoded": sum(len(answer.tokens) - 1 for answer in load.answers),
        "steps": sum(answer.steps for answer in load.answers),
        "outputs": [answer.tokens for answer in load.answers],
    }


def run(
    servers: dict[str, SglangServer],
    prompts: Sequence[Sequence[Prompt]],
    tokenizer,
    settings: Settings,
    journal: Path | None,
) -> list[dict]:
    """One record a (batch, group, arm); each is appended to the journal too, so that a broken run keeps what it has.

    prompts: of each batch size."""
    records: list[dict] = []
    arms = list(servers)
    for batch, share in zip(settings.batches, prompts, strict=True):
        groups = groups_of(share, batch)
        for index, group in enumerate(track(groups, f"batch {batch}", console=Console(stderr=True))):
            ids = chat_ids(tokenizer, group)
            for arm in arms[index % len(arms) :] + arms[: index % len(arms)]:
                record = {"batch": batch, "group": index, "category": group[0].category, "arm": arm}
                records.append(record | measure(servers[arm], ids, batch, settings))
                if journal:
                    with journal.open("a") as file:
                        file.write(json.dumps(records[-1]) + "\n")
    return records


def _select(records: Sequence[dict], **wanted: object) -> list[dict]:
    rows = [r for r in records if all(r[key] == value for key, value in wanted.items())]
    return sorted(rows, key=lambda r: r["group"])


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first differing token; None if equal."""
    for index, (a, b) in enumerate(zip(reference, other, strict=False)):
        if a != b:
            return index
    return None if len(reference) == len(other) else min(len(reference), len(other))


def difference_rate(rows: Sequence[dict], base: Sequence[dict]) -> float:
    """Share of outputs that differ anywhere from the baseline's."""
    pairs = [
        pair
        for row, plain in zip(rows, base, strict=True)
        for pair in zip(plain["outputs"], row["outputs"], strict=True)
    ]
    return sum(first_difference(*pair) is not None for pair in pairs) / len(pairs)


def summarise(records: Sequence[dict]) -> list[dict]:
    """Per batch, category ("all" included) and arm: throughput over plain, tokens per step, output differences."""
    summary = []
    for batch in sorted({r["batch"] for r in records}):
        categories = [*dict.fromkeys(r["category"] for r in records if r["batch"] == batch), None]
        for category in categories:
            wanted = {"batch": batch} | ({"category": category} if category else {})
            base = _select(records, arm=BASELINE, **wanted)
            for arm in dict.fromkeys(r["arm"] for r in records):
                rows = _select(records, arm=arm, **wanted)
                summary.append(
                    {"batch": batch, "category": category or "all", "arm": arm, **_figures(rows, base)}
                )
    return summary


def _figures(rows: list[dict], base: list[dict]) -> dict:
    columns = [[r[key] for r in side] for side in (rows, base) for key in ("tokens", "seconds")]
    return {
        "groups": len(rows),
        "throughput_ratio": throughput_ratio(*columns),
        "tokens_per_step": ratio_of_sums([r["decoded"] for r in rows], [r["steps"] for r in rows]),
        "milliseconds_per_step": 1e3
        * rows[0]["batch"]
        * (sum(r["decoded"] for r in rows) / sum(r["steps"] for r in rows))
        * (sum(r["seconds"] for r in rows) / sum(r["tokens"] for r in rows)),
        "tokens_per_second": sum(r["tokens"] for r in rows) / sum(r["seconds"] for r in rows),
        "outputs_differing": difference_rate(rows, base),
    }


def show(summary: Sequence[dict]) -> None:
    table = Table(title="decode throughput over plain decoding, 95% bootstrap intervals over prompt groups")
    for heading in (
        "batch",
        "category",
        "arm",
        "groups",
        "x plain",
        "tokens/step",
        "ms/step",
        "tokens/s",
        "differing",
    ):
        table.add_column(heading)
    for row in summary:
        figures = [
            row["throughput_ratio"],
            row["tokens_per_step"],
            f"{row['milliseconds_per_step']:.1f}",
            f"{row['tokens_per_second']:.1f}",
        ]
        cells = [
            row["batch"],
            row["category"],
            row["arm"],
            row["groups"],
            *figures,
            f"{row['outputs_differing']:.0%}",
        ]
        table.add_row(*map(str, cells))
    Console(width=140).print(table)


def choose_prompts(files: Sequence[Path], per_category: int, batches: Sequence[int]) -> list[list[Prompt]]:
    """Each batch size's prompts, at most `per_category` of a category, dealt out in turn."""
    kept: dict[str, list[Prompt]] = {}
    for prompt in (p for file in files for p in load_prompts(file)):
        category = spec_bench_category(prompt.category)
        kept.setdefault(category, []).append(Prompt(category, prompt.text))
    return [
        [prompt for rows in kept.values() for prompt in rows[place :: len(batches)][:per_category]]
        for place in range(len(batches))
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", default=[SHIPPED])
    parser.add_argument("--per-category", type=int, default=16)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["plain", "ngram", "sssd", "control"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--nodes", type=int, default=15, help="drafted tokens a tree (the root is one row more)"
    )
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--endpoint", default="", help="datastore service of the arm sssd_grpc")
    parser.add_argument("--prior", default="", help="prior directory of the arms sssd and sssd_static")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument(
        "--seen", action="store_true", help="every server has answered each prompt once before it is timed"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    from transformers import AutoTokenizer

    given = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # the servers are stopped on the way out
    settings = Settings(
        given.model, given.dtype, given.nodes, tuple(given.batch), given.max_tokens, given.temperature, given.endpoint,
        given.prior, not given.no_overlap, given.seen,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    prompts = choose_prompts(given.prompts, given.per_category, given.batch)
    for batch, share in zip(given.batch, prompts, strict=True):
        if not groups_of(share, batch):
            sys.exit(f"--batch {batch}: no category has {prompts_for(batch)} prompts for it")
    port = free_port()
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if {"control", "control_adaptive"} & set(given.arms):
            stack.enter_context(
                control_service(port, tokenizer.convert_tokens_to_ids("<|endoftext|>"), folder)
            )
        specs = {arm: arm_spec(arm, settings, port) for arm in given.arms}
        servers = {arm: stack.enter_context(running(spec, folder)) for arm, spec in specs.items()}
        warm_up = chat_ids(tokenizer, load_prompts(SHIPPED)[:WARM_UP_PROMPTS])
        for server in servers.values():
            # Alone, so that every server computes the KV of the chat template's beginning, which all prompts share, in
            # a prefill of the same shape: in bfloat16 its last bits depend on that.
            server.generate(warm_up[0], temperature=0, max_new_tokens=1)
            server.generate_many(
                warm_up * max(settings.batches), max(settings.batches), temperature=0, max_new_tokens=24
            )
        journal = given.json.with_suffix(".journal.jsonl") if given.json else None
        records = run(servers, prompts, tokenizer, settings, journal)
    summary = summarise(records)
    show(summary)
    if given.json:
        report = {"manifest": manifest(given.prompts, **vars(given)), "summary": summary, "records": records}
        given.json.write_text(json.dumps(report, default=as_json, indent=1))


if __name__ == "__main__":
    main()
