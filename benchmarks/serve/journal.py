"""The raw record of a serving run, a line at a time, so that a broken run keeps what it has: the manifest, then each load's record
(benchmarks.serve.measure) with every token and every gap, last what sglang.bench_serving found."""

from __future__ import annotations

import json
from pathlib import Path

SUFFIX = ".journal.jsonl"


class Journal:
    def __init__(self, path: Path, manifest: dict) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(manifest) + "\n")

    def add(self, kind: str, record: dict) -> None:
        """kind: of the record, for example group."""
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind} | record) + "\n")
