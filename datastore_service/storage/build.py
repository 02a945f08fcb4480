"""Builds a prior, a directory of segment files, from a corpus: what `specstore build` does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from datastore_service.storage.corpus import check_no_folder
from datastore_service.storage.directory_lock import DirectoryLock
from datastore_service.storage.errors import StorageError
from datastore_service.storage.fingerprint import tokenizer_fingerprint
from datastore_service.storage.manifest import MANIFEST, Manifest, has_manifest, read_manifest, write_manifest
from datastore_service.storage.parts import Built, Part, PartBuilder, Recipe, build_here, parts_of
from datastore_service.storage.segment_file import SUFFIX, write_segment
from datastore_service.storage.tokenizer import load_tokenizer

SEGMENT_TOKENS = 1 << 26
# The last segment of a part is smaller than the others, so a part holds several: about four, with 4 bytes of text a token.
PART_BYTES = 16  # for each token of a segment


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a build has come.

    documents, tokens: indexed by this run so far.
    segments: of the whole prior.
    """

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
    builder: PartBuilder = build_here,
) -> Manifest:
    """Tokenises the files (storage.corpus lists their kinds) and writes segments of at most `segment_tokens` tokens. A
    longer document gets a segment of its own.

    The corpus is divided into parts of whole files, and no segment reaches beyond its part. builder: who builds the parts. It
    changes no byte of the prior. A finished prior of the same tokenizer in the directory is appended to. An interrupted
    build of the same files continues after its last finished segment. progress is called after each segment.

    Raises StorageError for an unreadable file, an id outside the vocabulary, a directory of another tokenizer, a
    directory of another unfinished build or one that another process writes to, and a corpus without tokens."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = [Path(source) for source in sources]
    with DirectoryLock(directory):
        return _build(directory, paths, tokenizer_folder, field, segment_tokens, progress, builder)


def _build(
    directory: Path,
    paths: list[Path],
    tokenizer_folder: Path | str,
    field: str,
    segment_tokens: int,
    progress: Callable[[Progress], None],
    builder: PartBuilder,
) -> Manifest:
    manifest = _begin(directory, paths, tokenizer_folder, field, segment_tokens)
    recipe = Recipe(load_tokenizer(tokenizer_folder), field, manifest.vocab_size, segment_tokens)
    resumed = manifest.part > 0 or manifest.documents > 0
    documents = tokens = 0
    for built in builder(recipe, _unfinished(paths, segment_tokens, manifest)):
        manifest = _add_segment(directory, manifest, built)
        documents += built.segment.documents
        tokens += len(built.segment)
        progress(Progress(documents, tokens, len(manifest.segments)))
    if tokens == 0 and not resumed:
        raise StorageError(", ".join(map(str, paths)) or directory, "corpus", "holds no tokens")
    manifest = replace(manifest, source="", part=0, documents=0)
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
        check_no_folder(path)
        if not path.is_file():
            raise StorageError(path, "file", "no such file")
    fingerprint = tokenizer_fingerprint(tokenizer_folder)
    source = _source_digest(paths, field, segment_tokens)
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


def _unfinished(paths: list[Path], segment_tokens: int, manifest: Manifest) -> list[Part]:
    """The parts of which the manifest's segments do not hold all."""
    parts = parts_of(paths, PART_BYTES * segment_tokens)[manifest.part :]
    return [replace(part, skipped=manifest.documents * (part.number == manifest.part)) for part in parts]


def _source_digest(paths: list[Path], field: str, segment_tokens: int) -> str:
    """The digest of all that decides which documents are in which segment."""
    stamps = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    options = [field, segment_tokens, PART_BYTES]
    return hashlib.sha256(json.dumps([stamps, *options]).encode()).hexdigest()


def _add_segment(directory: Path, manifest: Manifest, built: Built) -> Manifest:
    name = f"{len(manifest.segments):06d}{SUFFIX}"
    write_segment(directory / name, built.segment, manifest.tokenizer)
    manifest = replace(
        manifest, segments=(*manifest.segments, name), part=built.part, documents=built.documents
    )
    write_manifest(directory, manifest)
    return manifest
