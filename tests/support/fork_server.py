"""`python -m tests.support.fork_server FD MODULE ...`: has imported SGLang's modules and forks itself into servers.

Importing SGLang is most of a server's start, and a server does it three times. Here it is done once. A fork knows what
a fresh interpreter knows after those imports and nothing else: no plugin is loaded, no thread started, no argument read.
It then runs the module it is asked for, as `python -m` does. The processes that this one starts with `multiprocessing`'s
spawn are forked beforehand, equally fresh; they are given their task as spawn gives it: file descriptors, environment and
pickled arguments. The first draft process of a server is forked too; a later one is started by its command.

On the socket FD comes one JSON message a server, with the descriptor of its output; back go its process id and, when it
ends, its status. When the socket closes, all servers are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import util

import setproctitle

MESSAGE = 1 << 20  # bytes of the longest
DESCRIPTORS = 16  # that one of them is handed
ABOVE = 512  # no descriptor of a spawned process has been numbered so high
DRAFT_FLAG = "--speculative-draft-model-path"  # of a server that starts a draft process
# Variables that a process reads while it runs. The others are read while SGLang or a library is imported: a process that
# wants them set otherwise is not forked from one that has imported them.
READ_LATE = ("SPECSTORE_", "MOONCAKE_", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")
OUTPUT_VARIABLE = "SPECSTORE_TEST_OUTPUT"  # names the descriptor that a forked draft process prints to
PR_SET_PDEATHSIG = 1


def import_all(modules: Sequence[str]) -> None:
    """Raises RuntimeError if that started a thread: it would be missing in a fork."""
    for name in modules:
        importlib.import_module(name)
    setproctitle.getproctitle()  # finds the room for the title while the environment is where it was
    if threads := len(os.listdir("/proc/self/task")) - 1:
        raise RuntimeError(
            f"importing {', '.join(modules)} started {threads} threads, which a fork would lack"
        )
    gc.collect()
    gc.freeze()


def serve(requests: socket.socket) -> dict:
    """Forks a child a request. Returns in a child, with its request; ends this process when the other side closes."""
    watched = selectors.DefaultSelector()
    watched.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in watched.select():
            if key.fileobj is not requests:
                _report_end(requests, watched, key)
                continue
            message, (*outputs,), *_ = socket.recv_fds(requests, MESSAGE, 1)
            if not message:
                _kill_all(watched)
            pid = os.fork()
            if pid == 0:
                watched.close()
                requests.close()
                _become_leader(*outputs)
                return json.loads(message)
            os.close(*outputs)
            watched.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            requests.send(json.dumps({"started": pid}).encode())


def _report_end(requests: socket.socket, watched: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    _, status = os.waitpid(key.data, 0)
    watched.unregister(key.fileobj)
    os.close(key.fd)
    requests.send(json.dumps({"ended": key.data, "status": os.waitstatus_to_exitcode(status)}).encode())


def _kill_all(watched: selectors.BaseSelector) -> None:
    for key in watched.get_map().values():
        if key.data:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(key.data, signal.SIGKILL)
    os._exit(0)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _become_leader(output: int) -> None:
    """Of a process group; what it prints goes to `output`."""
    os.setsid()
    _die_with_parent()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)


def _set_environment(environment: dict[str, str]) -> None:
    """One by one: the title of the process is found by where the environment begins."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    path = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [entry for entry in path if entry not in sys.path]


class Spare:
    """A child of this process that waits to be what is started later. Its constructor returns in both."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self._socket.close()
            self._socket = theirs
        else:
            theirs.close()

    def spawn(
        self, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> int:
        """Its process id, once it runs these arguments of the interpreter with these descriptors under their numbers."""
        order = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "numbers": list(descriptors),
        }
        socket.send_fds(self._socket, [json.dumps(order).encode()], descriptors)
        self._socket.close()
        return self.pid

    def wait(self) -> list[str]:
        """In the child: the arguments it is to run, once the rest is done. Ends with its parent."""
        message, descriptors, *_ = socket.recv_fds(self._socket, MESSAGE, DESCRIPTORS)
        if not message:
            os._exit(0)
        self._socket.close()
        order = json.loads(message)
        aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, ABOVE) for descriptor in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
        for descriptor, number in zip(aside, order["numbers"], strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _set_environment(order["environment"])
        return order["arguments"]


def processes_of(words: Sequence[str]) -> int:
    """How many a server with this command line starts: a scheduler for each tensor-parallel rank, and the detokenizer."""
    ranks = int(words[words.index("--tp") + 1]) if "--tp" in words else 1
    return ranks + 1


def fork_spares(count: int) -> Spare | None:
    """Children for `multiprocessing` to spawn; what else it starts, it starts itself. In such a child: the child."""
    spares: list[Spare] = []
    for _ in range(count):
        spares.append(Spare())
        if spares[-1].pid == 0:
            return spares[-1]
    start = util.spawnv_passfds

    def spawn(path: bytes, arguments: Sequence[bytes], descriptors: Sequence[int]) -> int:
        words = [os.fsdecode(word) for word in arguments]
        if "--multiprocessing-fork" in words and spares:
            return spares.pop(0).spawn(words, os.environ, descriptors)
        return start(path, arguments, descriptors)

    util.spawnv_passfds = spawn
    return None


class ForkedDraft:
    """What `sglang_patches.drafting.child` uses of a subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def fork_draft_process() -> Spare | None:
    """A child to be the first draft process that this one starts. In the child: the child."""
    imported_with = dict(os.environ)
    spares = [Spare()]
    if spares[0].pid == 0:
        return spares[0]
    from sglang_patches.drafting.peer import Peer  # not before the fork: it loads what starts threads

    start = Peer._start

    def fork(
        child: Peer, command: Sequence[str], environment: Mapping[str, str], descriptor: int, output: int
    ) -> subprocess.Popen | ForkedDraft:
        other = {name for name, _ in imported_with.items() ^ environment.items()}
        if spares and all(name.startswith(READ_LATE) for name in other):
            wanted = {**environment, OUTPUT_VARIABLE: str(output)}
            return ForkedDraft(spares.pop().spawn(command, wanted, [descriptor, output]))
        return start(child, command, environment, descriptor, output)

    Peer._start = fork
    return None


def run_module(module: str, words: Sequence[str]) -> None:
    """As `python -m`."""
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run_draft_process(command: Sequence[str]) -> None:
    """command: PYTHON -m MODULE WORDS."""
    _become_leader(int(os.environ.pop(OUTPUT_VARIABLE)))
    setproctitle.setproctitle(" ".join(command))
    _, _, module, *words = command
    run_module(module, words)


def run_spawned(arguments: Sequence[str]) -> None:
    """As the interpreter runs `-c PROGRAM --multiprocessing-fork`."""
    at = arguments.index("-c")
    sys.argv = ["-c", *arguments[at + 2 :]]
    exec(arguments[at + 1], {"__name__": "__main__"})


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    _die_with_parent()
    import_all(sys.argv[2:])
    request = serve(requests)
    _set_environment(request["environment"])
    module, words = request["module"], request["words"]
    sys.modules.pop(module, None)  # `python -m` runs a module that nobody has imported
    if spare := fork_spares(processes_of(words)):
        arguments = spare.wait()
        if DRAFT_FLAG in words and (draft := fork_draft_process()):
            run_draft_process(draft.wait())
        else:
            run_spawned(arguments)
    else:
        run_module(module, words)


if __name__ == "__main__":
    main()
