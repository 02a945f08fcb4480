"""Builds a prior with progress on the terminal, for the commands that do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from datastore_service.cli.output import progress

if TYPE_CHECKING:
    from datastore_service.storage.parts import PartBuilder


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


def build_shown(
    sources: Sequence[Path], out: Path, tokenizer: Path | str, field: str, ray: str | None = None
) -> BuiltPrior:
    """`storage.build.build_prior`, with its errors. ray: the address of a cluster, with the errors of `RayCluster`."""
    from datastore_service.storage.build import build_prior
    from datastore_service.storage.manifest import open_segments

    with progress() as bar, _part_builder(ray) as builder:
        task = bar.add_task("reading")
        manifest = build_prior(
            sources,
            out,
            tokenizer,
            field,
            progress=lambda p: bar.update(
                task, description=f"{p.documents:,} documents, {p.tokens:,} tokens, {p.segments} segments"
            ),
            builder=builder,
        )
    tokens = sum(map(len, open_segments(out)))
    return BuiltPrior(out, tokens, len(manifest.segments), manifest.tokenizer)


@contextmanager
def _part_builder(ray: str | None) -> Iterator[PartBuilder]:
    from datastore_service.storage.parts import build_here

    if ray is None:
        yield build_here
        return
    from datastore_service.storage.ray_cluster import RayCluster

    with RayCluster(ray) as cluster:
        yield cluster.build
