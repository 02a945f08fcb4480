"""`python -m tests.support.forked_programs NAME`: small programs for the tests of the fork server."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time

import setproctitle

LOADED: list[str] = []  # what a process has loaded: not what another one has


def report(queue: multiprocessing.SimpleQueue, word: str) -> None:
    state = {"loaded": LOADED, "late": os.environ["LATE"], "word": word, "parent": os.getppid()}
    queue.put(state | {"spawned": multiprocessing.parent_process() is not None})


def spawn() -> None:
    """Prints what processes see that this one spawns: one more than the fork server has ready."""
    LOADED.append("a plugin")
    os.environ["LATE"] = "set before the start"
    multiprocessing.set_start_method("spawn")
    queue = multiprocessing.SimpleQueue()
    states = []
    for i in range(3):
        process = multiprocessing.Process(target=report, args=(queue, f"argument {i}"))
        process.start()
        states.append(queue.get())
        process.join()
        states[-1]["status"] = process.exitcode
    print(json.dumps([os.getpid(), states]))


def say() -> None:
    print(json.dumps([sys.argv[1:], os.environ.get("CHOSEN"), os.getpgid(0) == os.getpid()]))
    sys.exit(3)


def wait() -> None:
    setproctitle.setproctitle("a title")
    print("waiting", flush=True)
    time.sleep(600)


def title() -> None:
    setproctitle.setproctitle("scheduler of a title longer than a name can be")
    with open("/proc/self/cmdline") as file:
        print(file.read().rstrip("\0 "))


if __name__ == "__main__":
    {"spawn": spawn, "say": say, "wait": wait, "title": title}[sys.argv[1]]()
elif os.environ.get("START_A_THREAD"):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
