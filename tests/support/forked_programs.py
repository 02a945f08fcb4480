"""`python -m tests.support.forked_programs NAME`: small programs for the tests of the fork server."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import setproctitle

from sglang_patches.drafting.peer import Peer
from sglang_patches.exchange.connection import SOCKET_VARIABLE

LOADED: list[str] = []  # what a process has loaded: not what another one has


def told(word: str) -> dict[str, object]:
    return {"loaded": LOADED, "late": os.environ["SPECSTORE_LATE"], "word": word, "parent": os.getppid()}


def report(queue: multiprocessing.SimpleQueue, word: str) -> None:
    queue.put(told(word) | {"spawned": multiprocessing.parent_process() is not None})


def spawn() -> None:
    """Prints what processes see that this one spawns: one more than the fork server has ready."""
    LOADED.append("a plugin")
    os.environ["SPECSTORE_LATE"] = "set before the start"
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


def draft() -> None:
    """As `spawn`, of draft processes that one process starts: the first two as one of a server does, the third with a variable that is
    read at import."""
    multiprocessing.set_start_method("spawn")
    queue = multiprocessing.SimpleQueue()
    process = multiprocessing.Process(target=start_drafts, args=(queue,))
    process.start()
    print(queue.get())
    process.join()


def start_drafts(queue: multiprocessing.SimpleQueue) -> None:
    LOADED.append("a plugin")
    states = []
    for early in ({}, {}, {"EARLY": "another"}):
        with tempfile.NamedTemporaryFile() as log:
            command = [sys.executable, "-m", "tests.support.forked_programs", "drafted", "a word"]
            child = Peer(command, early | {"SPECSTORE_LATE": "set before the start"}, Path(log.name))
            states.append(json.loads(child.receive(60)))
            states[-1]["files"] = [path == log.name for path in states[-1]["files"]]
            states[-1] |= {"pid": child.pid, "status": child.end(60), "log": log.read().decode()}
    queue.put(json.dumps([os.getpid(), states]))


def drafted() -> None:
    """What a draft process sees, over its socket; ends when that does."""
    connection = socket.socket(fileno=int(os.environ.pop(SOCKET_VARIABLE)))
    print("said", flush=True)
    state = told(sys.argv[2]) | {
        "early": os.environ.get("EARLY"),
        "command": " ".join(psutil.Process().cmdline()).split()[1:],
        "own session": os.getsid(0) == os.getpid(),
        "files": [file.path for file in psutil.Process().open_files()],
    }
    connection.sendall(json.dumps(state).encode())
    assert connection.recv(1) == b""
    sys.exit(4)


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
    {program.__name__: program for program in (spawn, draft, drafted, say, wait, title)}[sys.argv[1]]()
elif os.environ.get("START_A_THREAD"):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
