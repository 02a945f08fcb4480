"""The small set of prompts that is shipped, and the names of categories."""

from __future__ import annotations

import hashlib
from pathlib import Path

SHIPPED = Path(__file__).parent / "data" / "prompts.jsonl"
WORKSHOP = Path(__file__).resolve().parents[2] / "shared" / "data"
ALL = "all"  # in reports: the categories together
MT_BENCH = frozenset(
    ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
)
SPEC_BENCH = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


def spec_bench_category(category: str) -> str:
    """Spec-Bench's six tasks: the eight MT-bench categories are one of them."""
    return "mt_bench" if category in MT_BENCH else category


def digest(path: Path) -> str:
    """sha256 of a prompt file, for a run's manifest."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
