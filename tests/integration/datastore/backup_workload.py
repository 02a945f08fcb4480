"""A backup and a restore, killed at every call that changes a file: `python -m tests.integration.datastore.backup_workload`.

A data directory has a backup and text since then. For each point, one process writes the second backup, with which the first leaves, or
restores it, and kills itself there with SIGKILL. Whatever backup is listed afterwards must restore, whatever directory opens must be whole,
and the same call once more must succeed. What a power failure leaves of a call that was answered must be whole too.

Prints one line with the numbers of points; a failure ends it with a traceback.
"""

from __future__ import annotations

import gc
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from datastore_service.storage.atomic import remove_tree
from datastore_service.storage.backup import back_up, backup_names, read_backup
from datastore_service.storage.backup_store import BackupStore
from datastore_service.storage.data_directory import DataDirectory
from datastore_service.storage.errors import StorageError
from datastore_service.storage.restore import restore
from tests.integration.datastore.crash_workload import (
    VOCAB,
    Disk,
    Documents,
    Workload,
    after_power_failure,
    child,
    compile_kernels,
    document,
    must_succeed,
    open_engine,
    points,
)
from tests.live_text import documents_of

LIMIT = 1 << 16
FIRST, SECOND = range(12), range(20)


@dataclass(frozen=True)
class Place:
    """folder: of everything. data: the directory. first: a store with one backup."""

    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def first(self) -> Path:
        return self.folder / "first"

    def fresh(self, name: str, content: Path | None = None) -> Path:
        path = self.folder / name
        remove_tree(path)
        if content:
            shutil.copytree(content, path)
        return path


def fill(place: Place) -> None:
    place.data.mkdir(parents=True)
    workload = Workload(open_engine(place.data, LIMIT))
    for number in FIRST:
        workload.publish(number)
    workload.snapshot("a")
    back_up(place.data, BackupStore(str(place.first)))
    for number in SECOND[len(FIRST) :]:
        workload.publish(number)
    workload.sync()


def write_second(place: Place, store: Path) -> None:
    back_up(place.data, BackupStore(str(store)), keep=1)


def restore_newest(store: Path, root: Path) -> None:
    source = BackupStore(str(store))
    restore(source, read_backup(source, backup_names(source)[-1]), root)


def texts(numbers: range) -> Documents:
    return sorted(map(document, numbers))


def found_in(root: Path) -> Documents:
    engine = open_engine(root, LIMIT)
    found = sorted(documents_of(engine))
    engine.restore("a")
    assert sorted(documents_of(engine)) == texts(FIRST), "the snapshot"
    engine.close()
    return found


def check_store(place: Place, store: Path, answered: bool) -> None:
    source = BackupStore(str(store))
    names = backup_names(source)
    assert names and (not answered or names[0].startswith("00000002"))
    for name in names:
        copy = place.fresh("checked")
        restore(source, read_backup(source, name), copy)
        assert found_in(copy) == texts(FIRST if name.startswith("00000001") else SECOND), name
    write_second(place, store)
    assert len(backup_names(source)) == 1
    restore_newest(store, place.fresh("checked"))
    assert found_in(place.folder / "checked") == texts(SECOND)


def check_directory(store: Path, root: Path, answered: bool) -> None:
    complete = opens(root)
    assert complete or not answered
    if not complete:
        restore_newest(store, root)
    assert found_in(root) == texts(SECOND)


def opens(root: Path) -> bool:
    """Whether a service could open it. Raises AssertionError if it would have found nothing there and lost it so."""
    if not root.exists() or not any(root.iterdir()):
        return False
    try:
        DataDirectory(root, VOCAB).close()
    except StorageError as error:
        assert error.field == "restore", error
        return False
    return True


def killed(act: Callable[[], None], root: Path, kill_at: int, torn: bool) -> bool:
    """Whether the call was not answered."""
    status, told = child(lambda tell: (Disk(root, kill_at, torn), act(), tell(b"answered")))
    assert status in (0, signal.SIGKILL), told.decode(errors="replace")
    return not told


def calls_of(act: Callable[[], None], root: Path, lost: Path, mirror: Path) -> list[str]:
    """The calls that change files below `root`. What a power failure leaves afterwards is put into `lost`."""
    mirror.mkdir()

    def run(tell: Callable[[bytes], None]) -> None:
        disk = Disk(root, kill_at=0, mirror=mirror)
        act()
        tell("\n".join(disk.calls).encode())

    calls = must_succeed("counting", run).decode().split("\n")
    after_power_failure(mirror, root, lost)
    return calls


def kill_backups(place: Place, every: int) -> int:
    store = place.fresh("store")
    calls_of(lambda: write_second(place, store), store, place.fresh("lost"), place.fresh("mirror"))
    must_succeed("power", lambda _: restore_newest(place.folder / "lost", place.fresh("checked")))
    must_succeed("power", lambda _: check_found(place.folder / "checked"))
    store = place.fresh("store", place.first)
    calls = calls_of(lambda: write_second(place, store), store, place.fresh("lost"), place.fresh("mirror"))
    count = 0
    for number, torn in points(calls, every):
        store = place.fresh("store", place.first)
        answered = not killed(lambda at=store: write_second(place, at), store, number, torn)
        must_succeed((number, torn), lambda _, at=store, a=answered: check_store(place, at, a))
        count += not answered
    return count


def check_found(root: Path) -> None:
    assert found_in(root) == texts(SECOND)


def kill_restores(place: Place, every: int) -> int:
    store, root = place.fresh("store", place.first), place.fresh("restored")
    must_succeed("second", lambda _: write_second(place, store))
    calls = calls_of(lambda: restore_newest(store, root), root, place.fresh("lost"), place.fresh("mirror"))
    must_succeed("power", lambda _: check_found(place.folder / "lost"))
    count = 0
    for number, torn in points(calls, every):
        root = place.fresh("restored")
        answered = not killed(lambda at=root: restore_newest(store, at), root, number, torn)
        must_succeed((number, torn), lambda _, at=root, a=answered: check_directory(store, at, a))
        count += not answered
    return count


def main(folder: Path, every: int) -> None:
    compile_kernels()
    gc.freeze()
    place = Place(folder)
    must_succeed("filling", lambda _: fill(place))
    print(f"{kill_backups(place, every)} points of backups, {kill_restores(place, every)} of restores")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
