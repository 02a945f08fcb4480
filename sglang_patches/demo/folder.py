"""The folders of the demo's files: they are made once, kept with the checksums of their files (`SHA256SUMS`), and made again when these
do not match."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"
CHECKSUMS = "SHA256SUMS"
_held = threading.local()  # folders whose lock a thread has


class DemoModelError(RuntimeError):
    """The demo model's source is not the expected file, or what was made from it does not pass its checks."""


def cache_root() -> Path:
    """`$SPECSTORE_CACHE`, else `specstore` under the user's cache directory (`$XDG_CACHE_HOME`, `~/.cache`)."""
    if root := os.environ.get("SPECSTORE_CACHE"):
        return Path(root).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specstore"


def demo_model_dir() -> Path:
    """The demo model's Hugging Face folder: `<cache root>/models/SmolLM2-135M-Instruct`."""
    return cache_root() / "models" / MODEL_NAME


def made_once(out: Path, write: Callable[[Path], None]) -> Path:
    """The absolute path of `out`, written first when it is absent or does not match its checksums.

    write: fills an empty folder. Raises `DemoModelError` when `out` holds something else, and what `write` raises; then nothing
    is left behind.
    """
    out = out.absolute()
    if is_intact(out):
        return out
    if out.exists() and not (out / CHECKSUMS).exists() and any(out.iterdir()):
        raise DemoModelError(f"{out} holds something else: give a new or empty folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(out.parent):
        if not is_intact(out):
            _make(out, write)
    return out


def is_intact(folder: Path) -> bool:
    """Whether every file that `SHA256SUMS` names is there with that content."""
    sums = folder / CHECKSUMS
    if not sums.is_file():
        return False
    rows = [line.split("  ", 1) for line in sums.read_text().splitlines()]
    return all((folder / name).is_file() and sha256(folder / name) == digest for digest, name in rows)


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two processes that need it at once: the second waits and finds it made. A thread that has the lock already goes on: it makes one
    folder from another, which it makes first."""
    held: set[Path] = _held.__dict__.setdefault("folders", set())
    if folder in held:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        held.add(folder)
        yield
    finally:
        held.discard(folder)
        os.close(descriptor)


def _make(out: Path, write: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work:
        built = Path(work) / out.name
        built.mkdir()
        write(built)
        _make_readable(built)
        _write_checksums(built)
        shutil.rmtree(out, ignore_errors=True)
        built.rename(out)


def _make_readable(folder: Path) -> None:
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def _write_checksums(folder: Path) -> None:
    rows = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / CHECKSUMS).write_text("".join(rows))
    (folder / CHECKSUMS).chmod(0o644)
