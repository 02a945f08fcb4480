"""Every writer of a directory keeps the others out."""

import errno
import fcntl
import os
import threading

import numpy as np
import pytest

from datastore_service.storage.build import build_prior
from datastore_service.storage.data_directory import DataDirectory
from datastore_service.storage.directory_lock import LOCK, DirectoryLock
from datastore_service.storage.errors import StorageError
from datastore_service.storage.manifest import open_segments
from datastore_service.storage.parts import build_here
from datastore_service.storage.upgrade import upgrade_segments

VOCAB = 100
TEXT = np.arange(10, dtype=np.uint16)


@pytest.fixture
def prior(tmp_path, tokenizer_folder):
    """Builds a prior of one document in `out`."""
    np.save(tmp_path / "a.npy", TEXT[None])

    def build(**options):
        return build_prior([tmp_path / "a.npy"], tmp_path / "out", tokenizer_folder, **options)

    (tmp_path / "out").mkdir()
    return build


@pytest.mark.parametrize("writer", ["service", "build", "upgrade"])
@pytest.mark.parametrize("held", ["service", "build"])
def test_two_writers_never_share_a_directory(tmp_path, prior, writer, held):
    out = tmp_path / "out"
    writers = {
        "service": lambda: DataDirectory(out, VOCAB),
        "build": prior,
        "upgrade": lambda: upgrade_segments(out),
    }
    refused = []

    def meanwhile():
        with pytest.raises(StorageError, match=f"{out}: lock: another process writes here") as error:
            writers[writer]()
        refused.append(error)

    if held == "service":
        directory = DataDirectory(out, VOCAB)
        meanwhile()
        directory.close()
    else:
        prior(progress=lambda _: meanwhile())
    assert refused


def test_two_builds_at_once_lose_no_corpus(tmp_path, prior):
    """The second finds the first at work, or appends to what it has built."""
    began, go_on = threading.Event(), threading.Event()

    def held(recipe, parts):
        began.set()
        assert go_on.wait(60)
        yield from build_here(recipe, parts)

    first = threading.Thread(target=lambda: prior(builder=held))
    first.start()
    assert began.wait(60)
    with pytest.raises(StorageError, match="another process writes here"):
        prior()
    go_on.set()
    first.join()
    prior()
    found = [s.document(i).tolist() for s in open_segments(tmp_path / "out") for i in range(s.documents)]
    assert found == [TEXT.tolist()] * 2


def test_a_file_system_that_locks_no_directories_gets_a_file(tmp_path, monkeypatch):
    flock = fcntl.flock

    def as_nfs(descriptor, operation):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", as_nfs)
    open_files = os.listdir("/proc/self/fd")
    with DirectoryLock(tmp_path):
        assert (tmp_path / LOCK).exists()
        with pytest.raises(StorageError, match="another process writes here"):
            DirectoryLock(tmp_path)
    DirectoryLock(tmp_path).close()
    assert os.listdir("/proc/self/fd") == open_files


def test_a_directory_that_is_none_is_the_disk_s_own_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        DirectoryLock(tmp_path / "none")
