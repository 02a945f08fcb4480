"""The same servers under SGLang's own load generator, `sglang.bench_serving`: whether the figures of our steady load are
what others would measure. It starts all requests at once, ends with the slowest, prefills within the timed part and streams
every token, so its ratios lie nearer to one than those of a full batch's decoding."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report.records import Journal
from benchmarks.serve.cases import Request
from tests.support.servers.engine import SglangServer

KEPT = ("output_throughput", "median_ttft_ms", "median_itl_ms", "p99_itl_ms", "completed")


def bench_serving(
    server: SglangServer, requests: Sequence[Request], tokenizer, batch: int, max_tokens: int, folder: Path
) -> dict[str, float]:
    """KEPT of its report. Raises subprocess.CalledProcessError with its output as `stderr`."""
    prompts, report = folder / "bench-serving.jsonl", folder / "bench-serving-report.jsonl"
    # Rendered chats: its own --apply-chat-template takes out a beginning-of-text token that some templates use for turns.
    turns = ([{"content": tokenizer.decode(request.prompt)}, {"content": "none"}] for request in requests)
    prompts.write_text("".join(json.dumps({"conversations": pair}) + "\n" for pair in turns))
    report.unlink(missing_ok=True)
    options = {
        "backend": "sglang", "host": "127.0.0.1", "port": server.port, "model": server.spec.model,
        "dataset-name": "custom", "dataset-path": prompts, "num-prompts": len(requests),
        "sharegpt-output-len": max_tokens, "max-concurrency": batch, "output-file": report, "warmup-requests": 0,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "sglang.bench_serving", *words, "--disable-tqdm"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    measured = json.loads(report.read_text().splitlines()[-1])
    return {name: measured[name] for name in KEPT}


def cross_check(
    servers: dict[str, SglangServer],
    groups: dict[int, Sequence[Request]],
    tokenizer,
    max_tokens: int,
    folder: Path,
    journal: Journal,
) -> None:
    """One row a batch size and variant. groups: prompts that no server has answered, of each batch size."""
    for batch, group in groups.items():
        for variant, server in servers.items():
            row = bench_serving(server, group, tokenizer, batch, max_tokens, folder)
            journal.add("bench_serving", {"batch": batch, "variant": variant} | row)
