"""What a live tier holds, for tests that compare it with what was put in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from datastore_service.engine.engine import Engine
from datastore_service.engine.live.view import LiveView
from datastore_service.storage.live_segment import provenance_path


def documents_in(view: LiveView) -> list[list[int]]:
    """Segments' documents first, oldest first, then the fresh texts'."""
    parts = [segment.document(i) for segment in view.segments for i in range(segment.documents)]
    parts += [part for index in reversed(view.fresh) for part in index.documents()]
    return [part.tolist() for part in parts if len(part)]


def documents_of(engine: Engine) -> list[list[int]]:
    return documents_in(engine._live.view)


def with_provenance(segments: Iterable[str]) -> set[str]:
    """The names of segment files, and of the files beside them."""
    return {part for name in segments for part in (name, provenance_path(Path(name)).name)}
