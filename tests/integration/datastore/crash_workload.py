"""A stored live tier, killed at every call that changes a file: `python -m tests.integration.datastore.crash_workload`.

One process compiles the kernels; it forks a child for each point of the workload, which kills itself there with SIGKILL,
and another that recovers what was left and compares it with what was acknowledged. Every point is judged twice:

- as after `kill -9`: the files as they are;
- as after a power failure: of each file what it held when it was last synced, under the names that its directory had when
  that was last synced. (Real disks keep more than that, but never less.)

At every third point the power also fails after the next start: what that has shown must be there then.

Prints one line with the number of points; a failure ends it with a traceback.
"""

from __future__ import annotations

import builtins
import gc
import io
import itertools
import json
import os
import shutil
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from datastore_service.engine.engine import Engine
from datastore_service.engine.limits import Limits
from datastore_service.engine.live import merge_policy
from datastore_service.engine.provenance import Subject
from datastore_service.engine.segment import build_segment
from datastore_service.engine.session import SessionIndex
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening, Status
from datastore_service.storage.data_directory import DataDirectory, folder_name
from datastore_service.storage.encryption_keys import NO_KEYS, SECRET_BYTES, OperatorKeys, TextKeys
from datastore_service.storage.live_manifest import MANIFEST, read_live_manifest
from datastore_service.storage.log import log_name
from datastore_service.storage.segment_file import SegmentFile
from tests.live_text import documents_of, with_provenance

VOCAB = 2000
NAMESPACE = Namespace("m", "ab" * 32)
EVICTING_LIMIT = 120
USERS = 4
MOST_DOCUMENTS = 40  # of a workload that forgets

merge_policy.FRESH_TOKENS = 64

Documents = list[list[int]]


# What is done, and what must be there afterwards


def document(number: int) -> list[int]:
    return [number, *range(number % 7 + 5)]


def user_of(number: int) -> str:
    return f"user {number % USERS}"


def without(documents: Documents, users: Sequence[str]) -> Documents:
    return [text for text in documents if user_of(text[0]) not in users]


@dataclass(slots=True)
class Model:
    """What the tier holds. unsynced: the newest published documents, which a power failure may take from the end on."""

    documents: Documents = field(default_factory=list)
    snapshots: dict[str, Documents] = field(default_factory=dict)
    unsynced: Documents = field(default_factory=list)

    def after_power_failure(self) -> list[Documents]:
        """Every text that may be left."""
        lost = [self.unsynced[kept:] for kept in range(len(self.unsynced) + 1)]
        return [[text for text in self.documents if text not in gone] for gone in lost]


class Workload:
    """Operations on an engine, one at a time, each with its effect on the model."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._merges_wait = False

    def publish(self, number: int) -> None:
        tokens = np.array(document(number), np.int32)
        opening = Opening(user=user_of(number))
        (reply,) = self.engine.step([Entry("s", 0, tokens, opening=opening, closing=True)])
        assert reply.status is Status.OK
        if not self._merges_wait:  # else the order of the calls would differ from run to run
            self.engine.settle()

    def hold_merges(self) -> None:
        """Full fresh texts pile up."""
        self.engine._live._compactor.lock.acquire()
        self._merges_wait = True

    def release_merges(self) -> None:
        self._merges_wait = False
        self.engine._live._compactor.lock.release()
        self.engine.settle()

    def warmup(self, *numbers: int) -> None:
        self.engine.warmup([np.array(document(number)) for number in numbers])

    def flush(self) -> None:
        self.engine.flush(Tier.LIVE)

    def compact(self) -> None:
        self.engine.compact()

    def snapshot(self, name: str) -> None:
        self.engine.snapshot(name)

    def restore(self, name: str) -> None:
        self.engine.restore(name)

    def forget(self, *users: str) -> None:
        self.engine.forget([Subject.named("user", user) for user in users])
        if not self._merges_wait:
            self.engine.settle()

    def sync(self) -> None:
        self.engine.sync()


def expected_after(operation: tuple, before: Model) -> Model:
    name, *arguments = operation
    after = Model(list(before.documents), dict(before.snapshots))
    if name in ("publish", "warmup"):
        after.documents += [document(number) for number in arguments]
        after.unsynced = before.unsynced + ([document(arguments[0])] if name == "publish" else [])
    elif name in ("hold_merges", "release_merges"):
        after.unsynced = before.unsynced
    elif name == "flush":
        after.documents = []
    elif name == "snapshot":
        after.snapshots[arguments[0]] = list(before.documents)
    elif name == "restore":
        after.documents = list(before.snapshots[arguments[0]])
    elif name == "forget":
        after.documents = without(before.documents, arguments)
        after.snapshots = {kept: without(texts, arguments) for kept, texts in before.snapshots.items()}
    return after


def published(*numbers: int) -> list[tuple]:
    return [("publish", number) for number in numbers]


WORKLOADS: dict[str, list[tuple]] = {
    "mixed": [
        *published(*range(6)), ("sync",), *published(*range(6, 12)),
        ("hold_merges",), *published(*range(12, 26)), ("release_merges",),
        ("warmup", 100, 101, 102), ("snapshot", "a"), *published(40, 41), ("compact",), *published(42), ("flush",),
        *published(*range(50, 56)), ("restore", "a"), *published(60, 61), ("sync",), *published(62),
    ],
    "evicting": published(*range(26)),
    "forgetting": [
        *published(*range(16)), ("sync",), *published(*range(16, 19)), ("snapshot", "a"),
        *published(*range(19, 22)), ("forget", "user 1"), *published(*range(22, 28)), ("snapshot", "b"), ("sync",),
        *published(28, 29), ("forget", "user 2", "user 3"), ("forget", "user 2"), *published(32),
    ],
    "encrypting": [
        *published(*range(20)), ("snapshot", "a"), *published(20, 21), ("sync",), ("start_with", "first"), *published(22, 23),
        ("sync",), ("start_with", "second", "first"), *published(24),
    ],
}  # fmt: skip


# A disk that stops


class Disk:
    """Watches the calls that change files below `root`. kill_at: the number of the call before which the process ends,
    torn: after half of that call's bytes. mirror: folder for what a power failure would leave, None to keep none."""

    def __init__(self, root: Path, kill_at: int, torn: bool = False, mirror: Path | None = None) -> None:
        self._root, self._kill_at, self._torn, self._mirror = str(root), kill_at, torn, mirror
        self._lock = threading.RLock()
        self._held: dict[int, int] = {}  # descriptors that keep mirrored inodes from being used again
        self.calls: list[str] = []
        self._real = {name: getattr(os, name) for name in ("open", "write", "fsync")}
        for name in ("write", "fsync", "replace", "rename", "unlink", "rmdir", "link", "mkdir", "ftruncate"):
            setattr(os, name, self._watched(name, getattr(os, name)))
        os.open = self._watched("open", os.open, lambda args: bool(args[1] & os.O_CREAT))
        opened = self._watched("open", builtins.open, lambda args: "w" in "".join(args[1:2]))
        builtins.open = io.open = opened  # type: ignore[assignment]

    def _watched(self, name: str, real: Callable, changes: Callable = lambda args: True) -> Callable:
        def call(*args, **options):
            if not changes(args) or not self._is_ours(args[0], options.get("dir_fd")):
                return real(*args, **options)
            with self._lock:
                self.calls.append(name)
                if len(self.calls) == self._kill_at:
                    if self._torn:
                        real(args[0], args[1][: len(args[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                if name == "fsync":
                    return self._keep(args[0])
                return real(*args, **options)

        return call

    def stop(self) -> None:
        """No call gets any further."""
        self._lock.acquire()

    def _is_ours(self, target: object, directory: int | None) -> bool:
        if directory is not None:
            target = directory
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)  # type: ignore[call-overload]
        return str(path).startswith(self._root)

    def _keep(self, descriptor: int) -> None:
        """In place of fsync."""
        if self._mirror is None:
            return
        info = os.fstat(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if stat.S_ISDIR(info.st_mode):
            entries = [(e.name, e.inode(), e.is_dir()) for e in os.scandir(path)]
            data = json.dumps(entries).encode()
        else:
            with io.FileIO(path) as file:
                data = file.readall()
        target = self._real["open"](self._mirror / str(info.st_ino), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._real["write"](target, data)
        os.close(target)
        self._held.setdefault(info.st_ino, os.dup(descriptor))


def after_power_failure(mirror: Path, root: Path, target: Path) -> None:
    """Makes `target` what the mirror has of `root`."""

    def rebuild(inode: int, place: Path) -> None:
        place.mkdir()
        listing = mirror / str(inode)
        for name, entry, is_folder in json.loads(listing.read_text()) if listing.exists() else ():
            content = mirror / str(entry)
            if is_folder:
                rebuild(entry, place / name)
            else:
                (place / name).write_bytes(content.read_bytes() if content.exists() else b"")

    rebuild(root.stat().st_ino, target)


# The two kinds of children


def keys_of(*names: str) -> OperatorKeys:
    return OperatorKeys({name: name.encode().ljust(SECRET_BYTES) for name in names})


def keys_after(workload: str) -> OperatorKeys:
    """With which the directory is opened that a kill has left."""
    return keys_of("second", "first") if workload == "encrypting" else NO_KEYS


def limit_of(workload: str) -> int:
    return EVICTING_LIMIT if workload == "evicting" else 1 << 16


def open_engine(root: Path, limit: int) -> Engine:
    return engine_in(DataDirectory(root, VOCAB), limit)


def open_again(root: Path, workload: str) -> Engine:
    return engine_in(DataDirectory(root, VOCAB, keys_after(workload)), limit_of(workload))


def engine_in(directory: DataDirectory, limit: int) -> Engine:
    return Engine(VOCAB, limits=Limits(live_tokens=limit), store=directory.open(NAMESPACE))


def run_workload(root: Path, operations: list[tuple], limit: int, acknowledge: Callable[[int], None]) -> None:
    directory = DataDirectory(root, VOCAB)
    workload = Workload(engine_in(directory, limit))
    for number, (name, *arguments) in enumerate(operations, start=1):
        if name == "start_with":
            workload.engine.close()
            directory.close()
            directory = DataDirectory(root, VOCAB, keys_of(*arguments))
            workload = Workload(engine_in(directory, limit))
        else:
            getattr(workload, name)(*arguments)
        acknowledge(number)


def recover(root: Path, workload: str) -> None:
    engine = open_again(root, workload)
    engine.settle()
    engine.close()


def show(root: Path, mirror: Path, workload: str) -> None:
    """Opens what was left, and stops before the merges that are due."""
    disk = Disk(root, kill_at=0, mirror=mirror)
    open_again(root, workload)
    disk.stop()


def check(root: Path, texts: list[Documents], snapshots: list[dict[str, Documents]], workload: str) -> None:
    """texts: what the tier may hold. snapshots: what must be kept, before and after the operation that was interrupted."""
    evicting, forgetting = workload == "evicting", workload == "forgetting"
    engine, keys = open_again(root, workload), keys_after(workload).of(NAMESPACE)
    if forgetting:  # a start goes on with what had begun
        engine.settle()
    found = documents_of(engine)
    if evicting:
        newest = next((text for text in texts if text[-1:] == found[-1:]), None)
        assert newest is not None, (found[-1:], [text[-1:] for text in texts])
        assert found == newest[len(newest) - len(found) :], "a hole in what was published"
        longest = max(texts, key=len)
        assert found == newest or sum(map(len, longest)) + len(longest) > EVICTING_LIMIT, "evicted too early"
        assert found == newest or sum(map(len, found)) > EVICTING_LIMIT // 4, "evicted too much"
    else:
        assert any(sorted(found) == sorted(text) for text in texts), (_first(found), list(map(_first, texts)))
    engine.settle()
    settled = documents_of(engine)
    assert settled == (found[len(found) - len(settled) :] if evicting else found)
    folder = root / "live" / folder_name(NAMESPACE)
    check_files(folder, keys)
    kept = check_snapshots(root / "snapshots" / folder.name, snapshots, keys)
    if forgetting:
        check_bytes(root, [text for documents in (settled, *kept.values()) for text in documents])
    engine.step([Entry("t", 0, np.array([VOCAB - 1], np.int32), opening=Opening(), closing=True)])
    engine.close()


def _first(documents: Documents) -> list[int]:
    return [document[0] for document in documents]


def check_files(folder: Path, keys: TextKeys) -> None:
    manifest = read_live_manifest(folder)
    names = {path.name for path in folder.iterdir()}
    logs = {name for name in names if name.endswith(".log")}
    assert names - logs == {MANIFEST, *with_provenance(manifest.segments)}, "orphans"
    assert all(name >= log_name(manifest.first_log) for name in logs), "logs that no longer count"
    for name in manifest.segments:
        file = SegmentFile(folder / name, NAMESPACE.tokenizer, keys)
        file.verify()
        file.segment.check_integrity()


def check_bytes(root: Path, kept: Documents) -> None:
    """Every file is without the documents that are not kept."""
    numbers = {text[0] for text in kept}
    gone = [np.array(document(n), "<u2").tobytes() for n in range(MOST_DOCUMENTS) if n not in numbers]
    for path in root.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert not any(text in data for text in gone), f"{path} has forgotten text"


def check_snapshots(
    folder: Path, expected: list[dict[str, Documents]], keys: TextKeys
) -> dict[str, Documents]:
    """Those that were answered are there, and whatever is there is whole. Returns them."""
    found = {}
    for snapshot in folder.iterdir() if folder.exists() else ():
        files = [
            SegmentFile(snapshot / name, NAMESPACE.tokenizer, keys)
            for name in read_live_manifest(snapshot).segments
        ]
        for file in files:
            file.verify()
        segments = [file.segment for file in files]
        found[snapshot.name] = [s.document(i).tolist() for s in segments for i in range(s.documents)]
    for name in expected[0]:
        possible = [sorted(each[name]) for each in expected]
        assert sorted(found[name]) in possible, (_first(found[name]), list(map(_first, possible)))
    return found


# The parent


def child(act: Callable[[Callable[[bytes], None]], None]) -> tuple[int, bytes]:
    """Runs `act` in a fork; returns the wait status and what it told."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        write, os.fsync = os.write, lambda _: None  # a killed process does not need a real one
        try:
            act(lambda data: write(writer, data) and None)
            os._exit(0)
        except BaseException:
            write(writer, traceback.format_exc().encode())
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read()
    return os.waitpid(pid, 0)[1], told


def must_succeed(point: object, act: Callable[[Callable[[bytes], None]], None]) -> bytes:
    status, told = child(act)
    if status != 0:
        raise AssertionError(f"point {point}, status {status}:\n{told.decode()}")
    return told


@dataclass
class Trial:
    """One point of one workload. folder: is emptied."""

    folder: Path
    operations: list[tuple]
    models: list[Model]
    workload: str

    @property
    def limit(self) -> int:
        return limit_of(self.workload)

    def calls(self) -> list[str]:
        """The workload without a kill: the kinds of its calls."""
        root = self._fresh()

        def act(tell):
            disk = Disk(root, kill_at=0)
            run_workload(root, self.operations, self.limit, lambda _: None)
            tell(json.dumps(disk.calls).encode())

        return json.loads(must_succeed("none", act))

    def kill(self, number: int, torn: bool) -> bool:
        """False if the workload ended before the point."""
        root, mirror = self._fresh(), self.folder / "mirror"
        mirror.mkdir()

        def act(tell):
            Disk(root, number, torn, mirror)
            run_workload(root, self.operations, self.limit, lambda done: tell(bytes([done])))

        status, told = child(act)
        assert status in (0, signal.SIGKILL), told.decode(errors="replace")
        done = told[-1] if told else 0
        self._judge(number, torn, root, mirror, done)
        return status != 0

    def _judge(self, number: int, torn: bool, root: Path, mirror: Path, done: int) -> None:
        possible = self.models[done : done + 2]  # the operation that was interrupted may have been done
        kept, texts = [model.snapshots for model in possible], [model.documents for model in possible]
        left = [text for model in possible for text in model.after_power_failure()]
        for name, *users in self.operations[done : done + 1]:
            if (
                name == "forget"
            ):  # the logs may have lost their ends, and the text of the users leaves what is left
                left += [without(text, users) for text in left]
        lost = self.folder / "power"
        after_power_failure(mirror, root, lost)
        if number % 3 == 0:  # the recovery is killed too, at changing points
            child(lambda _: (Disk(root, 1 + number % 23), recover(root, self.workload)))
        shown = self.folder / "shown"
        if number % 3 == 1:
            must_succeed((number, torn), lambda _: show(root, mirror, self.workload))
            after_power_failure(mirror, root, shown)

        def act(_):
            check(lost, left, kept, self.workload)
            if shown.exists():
                check(shown, texts, kept, self.workload)
            check(root, texts, kept, self.workload)

        must_succeed((number, torn), act)

    def _fresh(self) -> Path:
        shutil.rmtree(self.folder, ignore_errors=True)
        root = self.folder / "data"
        root.mkdir(parents=True)
        return root


def points(calls: list[str], every: int) -> Iterator[tuple[int, bool]]:
    """One of `every` so many, and the first of each kind."""
    tried: set[tuple[str, bool]] = set()
    at = itertools.count()
    for number, name in enumerate(calls, start=1):
        for torn in (False, True) if name == "write" else (False,):
            if next(at) % every == 0 or (name, torn) not in tried:
                tried.add((name, torn))
                yield number, torn


def compile_kernels() -> None:
    """Without the background thread, which a fork would not have."""
    build_segment([np.arange(300)], VOCAB).check_integrity()
    SessionIndex().append(np.arange(3, dtype=np.int32))
    opening = Opening(publish=False)
    Engine(VOCAB).step(
        [Entry("s", 0, np.arange(3, dtype=np.int32), opening=opening, budget=Budget(2), closing=True)]
    )


def main(workload: str, folder: Path, every: int) -> None:
    compile_kernels()
    gc.freeze()  # a child's collector would touch, and so copy, all of it
    operations = WORKLOADS[workload]
    models = [Model()]
    for operation in operations:
        models.append(expected_after(operation, models[-1]))
    trial = Trial(folder, operations, models, workload)
    killed = 0
    for number, torn in points(trial.calls(), every):
        killed += trial.kill(number, torn)
    print(f"{killed} points")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
