"""The base package has no SGLang: what starts a datastore needs none."""

import subprocess
import sys

import pytest

HIDE = """
import importlib.metadata, sys

version = importlib.metadata.version

def without_sglang(name):
    if name in ("sglang", "torch"):
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

importlib.metadata.version = without_sglang
sys.modules |= dict.fromkeys(("sglang", "torch", "transformers"))  # their import fails
"""


@pytest.mark.parametrize("module", ["serve", "serve_pd", "processes"])
def test_a_launcher_is_imported(module):
    command = [sys.executable, "-c", f"{HIDE}\nimport sglang_patches.launch.{module}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
