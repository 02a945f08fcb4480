"""The first server's program with `sgl.Engine`: from an empty folder, with the wheel installed and no checkout on the path."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import grpc
import numpy as np
import pytest

from proto_gen.specstore.v1 import admin_pb2
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from tests.e2e.services import AUTHORIZED
from tests.support.servers.engine import one_architecture
from tests.waiting import eventually

CHECKOUT = Path(__file__).parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
NO_INDEX = "Could not find a version that satisfies the requirement hatchling"


def _program(model: Path) -> str:
    blocks = re.findall(
        r"^```python\n(.*?)^```",
        (CHECKOUT / "docs" / "first-server.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    (program,) = (block for block in blocks if "sgl.Engine(" in block)
    assert program.count('"MODEL"') == 1
    return program.replace('"MODEL"', repr(str(model)))


def _run(command: list[object], **options) -> subprocess.CompletedProcess:
    options = {"env": ENVIRONMENT} | options
    return subprocess.run(command, capture_output=True, text=True, timeout=600, **options)


def _packages(python: Path) -> Path:
    """The site-packages of an interpreter."""
    done = _run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The interpreter of an environment with our wheel. All else comes from this environment, but for its .pth files: one
    of them names the checkout."""
    wheels, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = _run([*pip, "wheel", "--no-deps", "--wheel-dir", wheels, CHECKOUT])
    if NO_INDEX in built.stderr:
        pytest.skip("no package index to take the build backend from")
    assert built.returncode == 0, built.stderr
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (_packages(python) / "all_else.pth").write_text(f"{Path(np.__file__).parents[1]}\n")
    done = _run([*pip, "--python", python, "install", "--no-deps", *wheels.glob("*.whl")])
    assert done.returncode == 0, done.stderr
    path = _run([python, "-P", "-c", "import sys; print(*sys.path, sep='\\n')"]).stdout.splitlines()
    assert not any(Path(entry, "pyproject.toml").exists() for entry in path), path
    return python


def _drafts(endpoint: str, tenant: str) -> int:
    """How many draft trees a tenant has asked a service for."""
    with grpc.insecure_channel(endpoint) as channel:
        stats = AdminStub(channel).Stats(admin_pb2.StatsRequest(), timeout=60, metadata=AUTHORIZED)
    return sum(space.drafts for space in stats.namespaces if space.namespace.tenant == tenant)


def test_the_program_of_the_readme(installed, tiny_model, datastore_endpoint, tmp_path):
    """It names the algorithm and nothing else of ours; its endpoint comes from the environment."""
    (tmp_path / "program.py").write_text(_program(tiny_model))
    variables = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SPECSTORE_ENDPOINT": datastore_endpoint,
        "SPECSTORE_TENANT": "a-program",
        "SPECSTORE_DEADLINE_MS": "500",
    }
    done = _run([installed, "program.py"], cwd=tmp_path, env=ENVIRONMENT | one_architecture() | variables)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = done.stdout.splitlines()[-1].split()
    assert answer and all(re.fullmatch(r"w\d+", word) for word in answer), done.stdout
    eventually(lambda: _drafts(datastore_endpoint, "a-program") > 0, "it has asked for no draft")
