"""A run of pytest that is ended by SIGTERM stops the servers that its fixtures started."""

import os
import signal
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[3]
HOOKS = "from tests.conftest import interrupt\nimport signal\nsignal.signal(signal.SIGTERM, interrupt)\n"
WAITING = """import pytest, subprocess, sys, time
@pytest.fixture(scope="session")
def server():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    yield child
    time.sleep(0.2)  # a server takes a while
    child.kill()
    print("stopped with status", child.wait(), file=sys.__stdout__, flush=True)
def test_it(server):
    print("started", file=sys.__stdout__, flush=True)
    time.sleep(1000)
"""


def test_fixtures_stop_their_servers_when_the_run_is_terminated_twice(tmp_path):
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "test_it.py").write_text(WAITING)
    command = [sys.executable, "-m", "pytest", "-qs", str(tmp_path), f"--rootdir={tmp_path}"]
    run = subprocess.Popen(command, cwd=CHECKOUT, env=os.environ, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert "started\n" in iter(run.stdout.readline, "")
    run.send_signal(signal.SIGTERM)
    run.send_signal(signal.SIGTERM)
    told, _ = run.communicate(timeout=60)
    assert f"stopped with status {-signal.SIGKILL}" in told
    assert run.returncode == 2  # pytest's: interrupted
