"""The launcher's children: their groups end with them, and their last words are kept."""

import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from sglang_patches.launch import processes
from sglang_patches.launch.processes import (
    Child,
    ChildDiedError,
    Part,
    port_taken,
    require_running,
    run_stack,
    wait_until,
)

SECONDS = 60  # of patience with a busy machine


def start(tmp_path, program: str) -> Child:
    return Child("child", [sys.executable, "-c", program], {}, tmp_path / "child.log")


def wait_for_line(child: Child, text: str) -> str:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        lines = (
            [line for line in child.log.read_text().splitlines() if text in line]
            if child.log.exists()
            else []
        )
        if lines:
            return lines[0]
        time.sleep(0.02)
    raise AssertionError(f"{text!r} never appeared")


def alive(pid: int) -> bool:
    """Whether the process runs; an orphan that waits to be reaped does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return False


def gone(pid: int) -> bool:
    deadline = time.monotonic() + SECONDS
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


GRANDCHILD = """
import subprocess, sys, time
print("grandchild", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""


def test_stop_ends_the_whole_group(tmp_path):
    child = start(tmp_path, GRANDCHILD)
    pid = int(wait_for_line(child, "grandchild").split()[1])
    child.stop()
    assert child.status is not None
    assert gone(pid)


def test_stop_ends_what_outlived_the_leader(tmp_path):
    child = start(tmp_path, GRANDCHILD)
    pid = int(wait_for_line(child, "grandchild").split()[1])
    os.kill(child._process.pid, 9)
    child._process.wait()
    assert alive(pid)
    child.stop()
    assert gone(pid)


def test_a_child_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "STOP_SECONDS", 0.3)
    child = start(
        tmp_path,
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)",
    )
    wait_for_line(child, "deaf")
    child.stop()
    assert child.status == -9


def test_a_dead_child_is_named_with_the_end_of_its_log(tmp_path):
    child = start(tmp_path, "import sys; [print('line', n) for n in range(100)]; sys.exit('no such model')")
    child._reader.join(SECONDS)
    with pytest.raises(
        ChildDiedError, match=r"child ended with status 1(.|\n)*line 99(.|\n)*no such model"
    ) as died:
        wait_until(lambda: False, [child], poll_seconds=0.02)
    assert "line 1\n" not in str(died.value)
    child.stop()


def test_a_running_child_is_no_error(tmp_path):
    child = start(tmp_path, "import time; time.sleep(60)")
    try:
        require_running([child])
    finally:
        child.stop()


def test_the_configuration_line_is_logged_and_not_shown(tmp_path, capfd):
    child = start(tmp_path, "print('server_args=ServerArgs(a=1)'); print('loading')")
    child._reader.join(SECONDS)
    assert child.log.read_text() == "server_args=ServerArgs(a=1)\nloading\n"
    assert capfd.readouterr().err == "child | loading\n"
    child.stop()


FOREIGN = r"""
import sys
from pathlib import Path
from sglang_patches.launch.processes import Child
said = r"import sys; sys.stdout.buffer.write('m\xfcller \u2192\n'.encode() + b'\xff\n')"
child = Child("foreign", [sys.executable, "-c", said], {}, Path(sys.argv[1]))
print(child.wait(60), ascii(child.tail()))
"""


def test_a_locale_that_lacks_a_character_ends_no_copying(tmp_path):
    """A child whose output nobody takes stands still."""
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN, tmp_path / "log"],
        capture_output=True,
        env=os.environ | ascii_alone,
        timeout=60,
    )
    assert done.stdout.decode() == "0 'm\\xfcller \\u2192\\n\\ufffd\\n'\n", done.stderr.decode()
    assert done.stderr.decode() == "foreign | m\\xfcller \\u2192\nforeign | \\ufffd\n"


def test_one_without_a_group_of_its_own_is_stopped_alone(tmp_path):
    program = "import time; print('started', flush=True); time.sleep(60)"
    child = Child("child", [sys.executable, "-c", program], {}, tmp_path / "child.log", own_group=False)
    wait_for_line(child, "started")
    assert os.getpgid(child.pid) == os.getpgid(0)
    child.stop()
    assert child.status == -15


def part(tmp_path, lives: list[float]) -> Part:
    """One that runs for so many seconds each time, the first time from when the stack is ready; healthy as soon as it runs."""
    program = f"""
import pathlib, time
folder = pathlib.Path({str(tmp_path)!r})
starts = folder / "starts"
with starts.open("a") as file: file.write("x")
while not (folder / "ready").exists(): time.sleep(0.02)
time.sleep({lives}[len(starts.read_text()) - 1])
"""
    return Part("part", [sys.executable, "-c", program], {}, lambda: bool(starts(tmp_path)))


def starts(tmp_path) -> int:
    file = tmp_path / "starts"
    return len(file.read_text()) if file.exists() else 0


def is_ready(tmp_path) -> None:
    """Fails the second time."""
    (tmp_path / "ready").touch(exist_ok=False)


class EnoughError(Exception):
    pass


def test_a_part_that_ends_is_started_again_and_the_others_stay(tmp_path, monkeypatch, capfd):
    def watched(seconds: float) -> None:
        if starts(tmp_path) == 3:
            raise EnoughError
        time.sleep(0.05)

    monkeypatch.setattr(processes, "time", SimpleNamespace(sleep=watched, monotonic=time.monotonic))
    other = Part("other", [sys.executable, "-c", "import time; time.sleep(600)"], {}, lambda: True)
    with pytest.raises(EnoughError):
        run_stack(
            [other, part(tmp_path, [0.3, 0.3, 600])], tmp_path, lambda: is_ready(tmp_path), restarts=True
        )
    said = capfd.readouterr().err
    assert said.count("serve: starting part again") == 2 and "other again" not in said


def test_a_part_that_does_not_come_back_ends_the_stack(tmp_path, monkeypatch):
    quick = SimpleNamespace(sleep=lambda seconds: time.sleep(0.05), monotonic=time.monotonic)
    monkeypatch.setattr(processes, "time", quick)
    answers = iter([True])  # then it is not healthy any more
    once = Part("part", part(tmp_path, [0.0, 0.0]).command, {}, lambda: next(answers, False))
    with pytest.raises(ChildDiedError, match="part ended"):
        run_stack([once], tmp_path, lambda: is_ready(tmp_path), restarts=True)
    assert starts(tmp_path) == 2


CHATTY = "import os, time\nwhile True: print(os.getpid(), flush=True); time.sleep(0.02)"
LAUNCHER = f"""
import sys
from pathlib import Path
from sglang_patches.launch.processes import Part, run_stack
part = [sys.executable, "-c", {CHATTY!r}]
run_stack([Part(name, part, {{}}, lambda: True) for name in "ab"], Path(sys.argv[1]), lambda: None)
"""


def test_a_launcher_whose_output_nobody_reads_ends_its_children(tmp_path):
    """As behind `| head`."""
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert launcher.stderr is not None
    try:
        pids: dict[str, int] = {}
        while len(pids) < 2:
            name, _, pid = launcher.stderr.readline().partition(" | ")
            pids[name] = int(pid)
        launcher.stderr.close()
        assert launcher.wait(SECONDS) != 0
    finally:
        launcher.kill()
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("in_turn", [False, True])
def test_parts_in_turn_wait_for_the_one_before(tmp_path, in_turn):
    """The second part says whether the first one was healthy when it began. The first one waits a while for the second."""
    first, second = tmp_path / "first", tmp_path / "second"
    paths = (
        f"import time, pathlib; first, second = pathlib.Path({str(first)!r}), pathlib.Path({str(second)!r})\n"
    )
    write = f"""
limit = time.monotonic() + {0.5 if in_turn else SECONDS}
while not second.exists() and time.monotonic() < limit: time.sleep(0.02)
first.touch()
time.sleep(600)
"""
    look = "second.write_text(str(first.exists())); time.sleep(600)"
    parts = [
        Part("first", [sys.executable, "-c", paths + write], {}, first.exists),
        Part(
            "second",
            [sys.executable, "-c", paths + look],
            {},
            lambda: second.exists() and bool(second.read_text()),
        ),
    ]

    def ready() -> None:
        raise EnoughError

    with pytest.raises(EnoughError):
        run_stack(parts, tmp_path, ready, in_turn=in_turn)
    assert second.read_text() == str(in_turn)


def test_parts_are_stopped_in_the_opposite_order(tmp_path, capfd):
    """An engine would count the end of its datastore as a failure."""
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    parts = [Part(name, waits, {}, lambda: True) for name in ("datastore", "engine", "router")]

    def ready() -> None:
        raise EnoughError

    with pytest.raises(EnoughError):
        run_stack(parts, tmp_path, ready)
    stopped = [line.split()[-1] for line in capfd.readouterr().err.splitlines() if "stopping" in line]
    assert stopped == ["router", "engine", "datastore"]


def test_a_listening_port_is_taken_and_a_free_one_is_not(free_port):
    assert not port_taken(free_port)
    with socket.create_server(("127.0.0.1", free_port)):
        assert port_taken(free_port)
    assert not port_taken(free_port)


def test_free_ports_are_never_those_of_outgoing_connections_nor_given_twice(free_port):
    ports = [processes.free_port() for _ in range(50)]
    assert len({free_port, *ports}) == 51
    assert all(20_000 <= port < 32_768 for port in ports)
