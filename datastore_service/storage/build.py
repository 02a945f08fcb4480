"""Builds a prior, a directory of segment files, from a corpus: what `specstore build` does."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np

from datastore_service.engine.segment import build_segment
from datastore_service.storage.corpus import groups, read_tokens
from datastore_service.storage.errors import StorageError
from datastore_service.storage.fingerprint import tokenizer_fingerprint
from datastore_service.storage.manifest import MANIFEST, Manifest, has_manifest, read_manifest, write_manifest
from datastore_service.storage.segment_file import SUFFIX, write_segment
from datastore_service.storage.tokenizer import load_tokenizer

SEGMENT_TOKENS = 1 << 26


@dataclass(frozen=True, slots=True)
class Progress:
    """documents, tokens: indexed by this build so far. An interrupted run's are included in documents only."""

    documents: int
    tokens: int
    segments: int


def build_prior(
    sources: Sequence[Path | str],
    directory: Path | str,
    tokenizer_folder: Path | str,
    field: str = "text",
    segment_tokens: int = SEGMENT_TOKENS,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Manifest:
    """Tokenises the files (storage.corpus lists their kinds) and writes segments of at most `segment_tokens` tokens. A
    longer document gets a segment of its own.

    A finished prior of the same tokenizer in the directory is appended to. An interrupted build of the same files
    continues after its last finished segment. progress is called after each segment.

    Raises StorageError for an unreadable file, an id outside the vocabulary, a directory of another tokenizer, a
    directory of another unfinished build, and a corpus without tokens."""
    directory = Path(directory)
    paths = [Path(source) for source in sources]
    manifest = _begin(directory, paths, tokenizer_folder, field, segment_tokens)
    tokenizer = load_tokenizer(tokenizer_folder)
    corpus = chain.from_iterable(read_tokens(path, field, tokenizer, manifest.vocab_size) for path in paths)
    documents = islice(corpus, manifest.documents, None)
    resumed, tokens = manifest.documents > 0, 0
    for group in groups(documents, segment_tokens):
        manifest = _add_segment(directory, manifest, group)
        tokens += sum(map(len, group))
        progress(Progress(manifest.documents, tokens, len(manifest.segments)))
    if tokens == 0 and not resumed:
        raise StorageError(", ".join(map(str, paths)) or directory, "corpus", "holds no tokens")
    manifest = replace(manifest, source="", documents=0)
    write_manifest(directory, manifest)
    return manifest


def vocabulary_size(tokenizer_folder: Path | str) -> int:
    """One more than the tokenizer's largest id, added tokens included."""
    return max(load_tokenizer(tokenizer_folder).get_vocab().values(), default=-1) + 1


def _begin(
    directory: Path, paths: list[Path], tokenizer_folder: Path | str, field: str, segment_tokens: int
) -> Manifest:
    """The manifest to start from: a new one, a finished prior's, or the one of this build's interrupted run."""
    if segment_tokens < 1:
        raise ValueError(f"segment_tokens: {segment_tokens} is below 1")
    for path in paths:
        if not path.is_file():
            raise StorageError(path, "file", "no such file")
    fingerprint = tokenizer_fingerprint(tokenizer_folder)
    source = _source_digest(paths, field, segment_tokens)
    directory.mkdir(parents=True, exist_ok=True)
    if not has_manifest(directory):
        return Manifest(fingerprint, vocabulary_size(tokenizer_folder), source=source)
    manifest = read_manifest(directory)
    if manifest.tokenizer != fingerprint:
        raise StorageError(
            directory / MANIFEST, "tokenizer", f"built with {manifest.tokenizer}, not {fingerprint}"
        )
    if manifest.source not in ("", source):
        raise StorageError(
            directory / MANIFEST, "source", "an unfinished build of other files or options is here"
        )
    return replace(manifest, source=source)


def _source_digest(paths: list[Path], field: str, segment_tokens: int) -> str:
    stamps = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(json.dumps([stamps, field, segment_tokens]).encode()).hexdigest()


def _add_segment(directory: Path, manifest: Manifest, group: list[np.ndarray]) -> Manifest:
    name = f"{len(manifest.segments):06d}{SUFFIX}"
    segment = build_segment(group, manifest.vocab_size, threads=os.cpu_count() or 1)
    write_segment(directory / name, segment, manifest.tokenizer)
    manifest = replace(
        manifest, segments=(*manifest.segments, name), documents=manifest.documents + len(group)
    )
    write_manifest(directory, manifest)
    return manifest
