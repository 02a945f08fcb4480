"""`python -m tests.mutations [NAME...]`: small changes of meaning, one at a time, that the unit tests beside the code must notice.

Each is made in a copy of the checkout. It is killed if one of its tests fails that does not fail without it.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.mutations.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
UNITS = "tests/unit"
LIMIT_SECONDS = 900.0
# The process ends with pytest: a thread that a failed test has left would keep the interpreter from its end.
PYTEST = "import os, sys, pytest; status = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(status)"
ARGUMENTS = ("-x", "-q", "--no-header", "--tb=no")
PASSED, FAILED = 0, 1  # statuses of pytest


def main() -> int:
    names = [mutant.name for mutant in MUTANTS]
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="of a mutant in table.py; all if none is given"
    )
    wanted = parser.parse_args().names or names
    if unknown := set(wanted).difference(names):
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if mutant.name in wanted]
    with tempfile.TemporaryDirectory(prefix="specstore-mutations-") as folder:
        copy = Path(folder) / "checkout"
        _copy_checkout(copy)
        passes = functools.cache(lambda tests: _tested(copy, tests)[0] == PASSED)
        killed = sum([_try(mutant, copy, passes) for mutant in chosen])
    print(f"{killed} of {len(chosen)} killed")
    return 0 if killed == len(chosen) else 1


def _copy_checkout(copy: Path) -> None:
    """What git would commit, and the compiled kernels, which take minutes to make."""
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    kernels = [path.relative_to(ROOT) for path in ROOT.glob("*/**/__pycache__/*.nb[ic]")]
    for name in [*filter(None, names), *kernels]:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def _try(mutant: Mutant, copy: Path, passes: Callable[[str], bool]) -> bool:
    """Whether it is killed. Prints a line. passes: whether these tests do without it."""
    began = time.monotonic()
    with _made(mutant, copy):
        status, test = _tested(copy, mutant.tests)
    seconds = time.monotonic() - began
    killed = status == FAILED and passes(mutant.tests)
    fate = "killed" if killed else "survived" if status == PASSED else "unclear"
    print(f"{fate:9} {mutant.name:22} {seconds:4.0f} s  {test}".rstrip(), flush=True)
    return killed


@contextmanager
def _made(mutant: Mutant, copy: Path) -> Iterator[None]:
    """The copy has the change inside the block."""
    path = copy / mutant.file
    text, times = path.read_text(), path.stat()
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.name}: {mutant.file} has its text {text.count(mutant.old)} times, not once"
        )
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # by which compiled code is found stale


def _tested(copy: Path, tests: str) -> tuple[int | None, str]:
    """The status of pytest, None if it took too long, and the first test that failed."""
    command = [sys.executable, "-c", PYTEST, *ARGUMENTS, str(Path(UNITS, tests))]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        with suppress(ProcessLookupError):  # no process of its group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output.read(), re.MULTILINE)
    return status, failed[1] if failed else ""


if __name__ == "__main__":
    sys.exit(main())
