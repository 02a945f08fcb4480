"""Every version of SGLang that the plugin supports and this environment does not have: its environment is made from its lock, the
host table is compared, what cannot run is refused, steps are verified, and a method without a draft process and one with it run the
conformance suite there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sglang_patches.host.versions import INSTALLED, TESTED

CHECKOUT = Path(__file__).parents[2]
SECONDS = 3600  # the first run also installs several GiB

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * SECONDS)]


@pytest.fixture(scope="module", params=[tested for tested in TESTED if tested != INSTALLED])
def python(request) -> Path:
    """The interpreter of that version's environment."""
    command = [CHECKOUT / "requirements" / "env.sh", f"sglang-{request.param}"]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=SECONDS)
    return Path(made.stdout.splitlines()[-1]) / "bin" / "python"


def _run(python: Path, *words: str) -> None:
    environment = os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [python, "-m", *words],
        cwd=CHECKOUT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout


def test_host_table_matches(python):
    _run(python, "sglang_patches.check")


def test_device_check_and_python_api(python):
    """Of one method: not every version has all of them."""
    check = "tests/e2e/test_check.py::test_device_check_passes_here"
    _run(python, "pytest", "-q", check, "tests/e2e/test_engine.py")


def test_settings(python):
    """Refusals, and which attention backend verifies on an accelerator."""
    plugin = ["tests/unit/plugin/test_refusals.py", "tests/unit/plugin/test_settings.py"]
    _run(python, "pytest", "-q", *plugin, "tests/unit/start/test_tree_attention.py")


def test_verification(python):
    """With custom logit processors too, which the suite does not have."""
    _run(python, "pytest", "-q", "tests/unit/verification")


@pytest.mark.parametrize("method", ["SSSD", "SAGUARO"])
def test_conformance(python, method):
    _run(python, "pytest", "-q", "tests/conformance", "-k", "not toy", "--method", method)
