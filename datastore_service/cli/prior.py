"""Builds a prior with progress on the terminal, for the commands that do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from datastore_service.cli.output import progress


@dataclass(frozen=True, slots=True)
class BuiltPrior:
    """What a prior's directory holds. tokenizer: its fingerprint."""

    directory: Path
    tokens: int
    segments: int
    tokenizer: str

    @property
    def fields(self) -> dict[str, object]:
        return {"tokens": self.tokens, "segments": self.segments, "tokenizer": self.tokenizer}

    def __str__(self) -> str:
        held = f"{self.tokens:,} tokens in {self.segments} segments"
        return f"{self.directory}: {held}, tokenizer {self.tokenizer}"


def build_shown(sources: Sequence[Path], out: Path, tokenizer: Path | str, field: str) -> BuiltPrior:
    """`storage.build.build_prior`, with its errors."""
    from datastore_service.storage.build import build_prior
    from datastore_service.storage.manifest import open_segments

    with progress() as bar:
        task = bar.add_task("reading")
        manifest = build_prior(
            sources,
            out,
            tokenizer,
            field,
            progress=lambda p: bar.update(
                task, description=f"{p.documents:,} documents, {p.tokens:,} tokens, {p.segments} segments"
            ),
        )
    tokens = sum(map(len, open_segments(out)))
    return BuiltPrior(out, tokens, len(manifest.segments), manifest.tokenizer)
