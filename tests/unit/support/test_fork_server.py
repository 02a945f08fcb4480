"""A forked process is as one that its command starts: arguments, variables, what it spawns, how it ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.fork_server import DRAFT_FLAG
from tests.support.servers import forked
from tests.support.servers.forked import ForkServer
from tests.waiting import eventually

ROOT = Path(__file__).parents[3]
PROGRAMS = "tests.support.forked_programs"


@pytest.fixture(scope="module")
def server():
    return ForkServer([PROGRAMS], forked.FORKABLE | {"CHOSEN": "by the server"})


def output(server, *words: str, **variables: str):
    process = server.fork(PROGRAMS, list(words), server.environment | variables)
    return process.stdout.read(), process.wait(60)


def test_arguments_variables_group_and_status(server):
    said, status = output(server, "say", "a word", CHOSEN="by the test")
    assert (json.loads(said), status) == ([["say", "a word"], "by the test", True], 3)
    assert json.loads(output(server, "say")[0])[1] == "by the server"


def test_spawned_processes_know_only_what_they_are_given(server):
    """Two of them are forked beforehand, the third is spawned as ever: no difference shows."""
    said, status = output(server, "spawn")
    pid, states = json.loads(said)
    assert status == 0
    expected = {"loaded": [], "late": "set before the start", "parent": pid, "spawned": True, "status": 0}
    assert states == [expected | {"word": f"argument {i}"} for i in range(3)]


def test_a_draft_process_knows_only_what_it_is_given(server):
    """The first is forked, the second is started by its command, and so is one with another variable that is read at import."""
    process = server.fork(PROGRAMS, ["draft", DRAFT_FLAG], server.environment)
    pid, states = json.loads(process.stdout.read())
    assert process.wait(60) == 0
    forked, *started = [state.pop("pid") for state in states]
    expected = {
        "loaded": [],
        "late": "set before the start",
        "word": "a word",
        "parent": pid,
        "command": ["-m", PROGRAMS, "drafted", "a", "word"],
        "own session": True,
        "files": [True, True],  # its log
        "status": 4,
        "log": "said\n",
    }
    assert states == [expected | {"early": early} for early in (None, None, "another")]
    assert forked < min(started), "it was not forked beforehand"


def test_a_process_can_take_a_title(server):
    assert output(server, "title")[0].startswith("scheduler of a title longer than a name can be")


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_it_is_ended_as_any_process(server, how):
    process = server.fork(PROGRAMS, ["wait"], server.environment)
    assert process.stdout.readline() == "waiting\n" and process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    getattr(process, how)()
    assert process.wait(60) == -{"terminate": signal.SIGTERM, "kill": signal.SIGKILL}[how]


def test_all_end_with_the_process_that_asked_for_them():
    program = f"""
import os, time
from tests.support.servers import forked
from tests.support.servers.forked import ForkServer
server = ForkServer([], {{}})
process = server.fork({PROGRAMS!r}, ["wait"], os.environ)
process.stdout.readline()
print(server._process.pid, process.pid, flush=True)
time.sleep(600)
"""
    asking = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    processes = [psutil.Process(int(word)) for word in asking.stdout.readline().split()]
    assert len(processes) == 2
    asking.kill()
    asking.wait()
    psutil.wait_procs(processes, timeout=60)
    eventually(lambda: not any(map(_alive, processes)), "a forked process is left")


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_imports_that_start_a_thread_are_refused():
    server = ForkServer([PROGRAMS], forked.FORKABLE | {"START_A_THREAD": "1"})
    with pytest.raises(RuntimeError, match="the fork server ended with status 1"):
        server.fork(PROGRAMS, ["say"], os.environ)


def test_variables_that_are_read_at_import_need_a_process_of_their_own(monkeypatch):
    monkeypatch.setattr(forked, "ForkServer", lambda modules, variables: variables)
    forked._fork_server.cache_clear()
    usual = forked.fork_server({"SGLANG_USE_CPU_ENGINE": "1"})
    late = {"SPECSTORE_NODES": "3", "PYTHONPATH": "anything", "OMP_WAIT_POLICY": "PASSIVE"}
    assert forked.fork_server({"SGLANG_USE_CPU_ENGINE": "1"} | late) is usual
    retracting = forked.fork_server({"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_TEST_RETRACT": "1"})
    assert retracting == usual | {"SGLANG_TEST_RETRACT": "1"}
    forked._fork_server.cache_clear()
