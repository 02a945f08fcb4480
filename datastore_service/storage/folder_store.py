"""A live tier in a folder: its manifest, segment files and logs. Implements the engine's `LiveStore`.

A segment file or log is valid only if the manifest lists its name or number. A killed process leaves files that are not
valid; nobody reads them, and the next start removes them. A snapshot is a folder of the same kind, made of hard links:
segment files never change.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from datastore_service.engine.live.store import Document, Found, LogStats, Recovered
from datastore_service.engine.provenance import Selection, Subject
from datastore_service.engine.segment import Segment
from datastore_service.storage.atomic import TEMPORARY, remove_tree, sync_directory
from datastore_service.storage.encryption_keys import NO_KEYS, OperatorKeys
from datastore_service.storage.errors import StorageError
from datastore_service.storage.live_manifest import (
    FORMAT,
    MANIFEST,
    LiveManifest,
    read_live_manifest,
    segment_number,
    write_live_manifest,
)
from datastore_service.storage.live_segment import SUFFIX as PROVENANCE_SUFFIX
from datastore_service.storage.live_segment import (
    link_live_segment,
    open_live_segment,
    provenance_path,
    remove_live_segment,
    write_live_segment,
    write_provenance,
)
from datastore_service.storage.log import LOG_NAME, LogWriter, log_name, read_log, warn_of_torn
from datastore_service.storage.search import search
from datastore_service.storage.segment_file import SUFFIX
from datastore_service.storage.snapshots import snapshot_folders, snapshot_path, thin_snapshot


class FolderStore:
    """`LiveStore` describes the methods, and which of them may run at the same time.

    folder: has a manifest. snapshots: folder of this namespace's snapshots, each a folder. keys: of the operator; those of the namespace
    encrypt what is written."""

    def __init__(self, folder: Path, snapshots: Path, keys: OperatorKeys = NO_KEYS) -> None:
        """Raises StorageError if the manifest cannot be used."""
        self.manifest = read_live_manifest(folder)
        self._keys = keys.of(self.manifest.namespace)
        self._folder, self._snapshots = folder, snapshots
        self._file_names: dict[Segment, str] = {}
        # Names that the manifest on the disk may list: a save that failed may have replaced the manifest nevertheless.
        self._in_manifest: set[str] = set()
        self._numbers = itertools.count(1)
        self._logs: dict[int, LogWriter] = {}
        self._old_logs: dict[int, int] = {}  # logs of an earlier process: number -> bytes

    def recover(self) -> Recovered:
        """Reads everything before it removes anything. Raises StorageError naming the file that cannot be used."""
        sync_directory(self._folder)  # a killed process may have renamed files and not synced the directory
        segments = tuple(self._open_verified(name) for name in self.manifest.segments)
        self.manifest = replace(self.manifest, format=FORMAT)
        logs = self._read_logs()
        self._in_manifest = set(self.manifest.segments)
        self._numbers = itertools.count(max(map(segment_number, self.manifest.segments), default=0) + 1)
        self._old_logs = {number: self._log_path(number).stat().st_size for number in logs}
        self._remove_leftovers(set(logs))
        documents = tuple((number, logs[number]) for number in sorted(logs))
        next_log = max(logs, default=self.manifest.first_log - 1) + 1
        return Recovered(segments, documents, next_log, self.manifest.forgetting)

    def append(self, number: int, tokens: np.ndarray, provenance: np.ndarray) -> None:
        if number not in self._logs:
            path, manifest = self._log_path(number), self.manifest
            self._logs[number] = LogWriter(path, manifest.tokenizer, manifest.vocab_size, self._keys)
        self._logs[number].append(tokens, provenance)

    def sync(self) -> None:
        failure = None
        for writer in list(self._logs.values()):
            try:
                writer.sync()
            except OSError as error:  # the others are still synced
                failure = error
        if failure is not None:
            raise failure

    def keep(self, segment: Segment) -> Segment:
        name = self._new_name()
        with self._removed_if_it_fails(name):
            written = write_live_segment(self._folder / name, segment, self.manifest.tokenizer, self._keys)
        return self._register(name, written)

    def discard(self, segment: Segment) -> None:
        name = self._file_names.get(segment)
        if name and name not in self._in_manifest:  # otherwise a save has removed it, or the next one will
            del self._file_names[segment]
            remove_live_segment(self._folder / name)

    def save(
        self, segments: tuple[Segment, ...], first_log: int, forgetting: frozenset[Subject] = frozenset()
    ) -> None:
        names = self._names(segments)
        manifest = replace(self.manifest, segments=names, first_log=first_log, forgetting=forgetting)
        self._in_manifest.update(names)
        write_live_manifest(self._folder, manifest)
        self.manifest = manifest
        self._remove_segments(self._in_manifest.difference(names))
        self._remove_logs(first_log)

    def snapshot(self, name: str, segments: tuple[Segment, ...]) -> None:
        target = snapshot_path(self._snapshots, name)
        if target.exists():
            raise FileExistsError(errno.EEXIST, "there is a snapshot of that name", str(target))
        self._snapshots.mkdir(exist_ok=True)
        sync_directory(self._snapshots.parent)
        temporary = self._snapshots / (name + TEMPORARY)
        remove_tree(temporary)
        temporary.mkdir()
        try:
            names = self._names(segments)
            for segment_name in names:
                source, linked = self._folder / segment_name, temporary / segment_name
                link_live_segment(source, linked, self.manifest, self._keys)
            kept = replace(self.manifest, segments=names, first_log=1, forgetting=frozenset())
            write_live_manifest(temporary, replace(kept, created=time.time()))
            temporary.rename(target)
        except BaseException:
            remove_tree(temporary)
            raise
        sync_directory(self._snapshots)

    def open_snapshot(self, name: str) -> tuple[Segment, ...]:
        """Raises StorageError for a damaged snapshot or one of another namespace."""
        source = snapshot_path(self._snapshots, name)
        if not source.is_dir():
            raise FileNotFoundError(errno.ENOENT, "there is no snapshot of that name", str(source))
        manifest = read_live_manifest(source)
        if manifest.namespace != self.manifest.namespace:
            raise StorageError(source / MANIFEST, "namespace", f"of {manifest.namespace}, not this one's")
        for segment in manifest.segments:
            open_live_segment(source / segment, manifest, self._keys)
        return self._link_files(source, manifest)

    def thin_snapshots(self, leaving: Selection) -> list[np.ndarray]:
        removed = []
        for snapshot in snapshot_folders(self._snapshots):
            removed += thin_snapshot(snapshot, leaving, self._keys)
        return removed

    def search(self, wanted: Selection, texts: Sequence[np.ndarray]) -> Found:
        return search((self._folder, self._snapshots), self.manifest, self._keys, wanted, texts)

    def stats(self) -> LogStats:
        writers = list(self._logs.values())
        unsynced = sum(writer.size - writer.synced for writer in writers)
        return LogStats(sum(w.size for w in writers) + sum(list(self._old_logs.values())), unsynced)

    def close(self) -> None:
        for writer in self._logs.values():
            writer.close()

    def _log_path(self, number: int) -> Path:
        return self._folder / log_name(number)

    def _new_name(self) -> str:
        return f"{next(self._numbers):08d}{SUFFIX}"

    def _names(self, segments: Iterable[Segment]) -> tuple[str, ...]:
        return tuple(self._file_names[segment] for segment in segments)

    def _open_verified(self, name: str) -> Segment:
        """A segment that an earlier process left. One of an earlier format gets the file that it lacks."""
        segment = open_live_segment(self._folder / name, self.manifest, self._keys)
        if self.manifest.format != FORMAT:
            write_provenance(self._folder / name, segment.provenance, self._keys)
        return self._register(name, segment)

    def _register(self, name: str, segment: Segment) -> Segment:
        """Notes the name of a segment's file in the folder; returns the segment."""
        self._file_names[segment] = name
        return segment

    def _log_numbers(self) -> list[int]:
        names = [LOG_NAME.fullmatch(path.name) for path in self._folder.iterdir()]
        return [int(name[1]) for name in names if name]

    def _read_logs(self) -> dict[int, list[Document]]:
        """The documents of each valid log that has some, by number. They are synced: they may not have been yet."""
        logs = {}
        for number in self._log_numbers():
            if number < self.manifest.first_log:
                continue
            path = self._log_path(number)
            contents = read_log(path, self.manifest.tokenizer, self.manifest.vocab_size, self._keys)
            warn_of_torn(path, contents)
            if contents.documents:
                _sync_file(path)
                logs[number] = contents.documents
        return logs

    def _remove_leftovers(self, logs: set[int]) -> None:
        """Removes files that are not valid, and temporary files of interrupted writers."""
        segments = [self._folder / name for name in self._in_manifest]
        valid = self._in_manifest | {provenance_path(path).name for path in segments}
        valid |= {log_name(number) for number in logs}
        for path in self._folder.iterdir():
            ours = path.suffix in (TEMPORARY, SUFFIX, PROVENANCE_SUFFIX) or LOG_NAME.fullmatch(path.name)
            if ours and path.name not in valid:
                path.unlink()
        for path in self._snapshots.glob("*" + TEMPORARY):
            remove_tree(path)

    def _link_files(self, source: Path, manifest: LiveManifest) -> tuple[Segment, ...]:
        """Links a snapshot's segments into the folder and maps them there."""
        segments: list[Segment] = []
        try:
            for stored in manifest.segments:
                name = self._new_name()
                with self._removed_if_it_fails(name):
                    link_live_segment(source / stored, self._folder / name, manifest, self._keys)
                    opened = open_live_segment(
                        self._folder / name, replace(manifest, format=FORMAT), self._keys, verify=False
                    )
                segments.append(self._register(name, opened))
            sync_directory(self._folder)
        except BaseException:
            for segment in segments:
                self.discard(segment)
            raise
        return tuple(segments)

    @contextmanager
    def _removed_if_it_fails(self, name: str) -> Iterator[None]:
        """Surrounds the making of a segment's files. What is left of them would keep text that may be forgotten."""
        try:
            yield
        except BaseException:
            self._in_manifest.add(name)  # the next save removes what is still there
            remove_live_segment(self._folder / name)
            self._in_manifest.discard(name)
            raise

    def _remove_segments(self, names: set[str]) -> None:
        for name in names:
            remove_live_segment(self._folder / name)
            self._in_manifest.discard(name)
        for segment, name in list(self._file_names.items()):
            if name in names:
                del self._file_names[segment]

    def _remove_logs(self, first: int) -> None:
        for number in [number for number in (*self._logs, *self._old_logs) if number < first]:
            self._log_path(number).unlink(missing_ok=True)
            self._old_logs.pop(number, None)
            if number in self._logs:
                self._logs.pop(number).close()


def create_folder(folder: Path, manifest: LiveManifest) -> None:
    """Creates the folder of a new namespace durably. An incomplete one is completed."""
    folder.mkdir(exist_ok=True)
    write_live_manifest(folder, manifest)
    sync_directory(folder.parent)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
