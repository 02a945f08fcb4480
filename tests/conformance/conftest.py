"""The suite's parameters: every method of the registry. A method that is added there inherits every test.

`--method NAME` runs it for one. `--method-plugin FILE` takes the methods from a plugin instead: a module with METHODS.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

# SGLang decides at import whether it serves on a CPU.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from sglang_patches.drafting.registry import METHODS, Method  # noqa: E402
from tests.e2e.services import DatastoreService, serving  # noqa: E402
from tests.support.tiny_model import write_spelling_model  # noqa: E402


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "method" in metafunc.fixturenames:
        methods = _methods(metafunc.config)
        metafunc.parametrize("method", methods.values(), ids=list(methods), scope="session")


def _methods(config: pytest.Config) -> dict[str, Method]:
    plugin, name = config.getoption("--method-plugin"), config.getoption("--method")
    methods = METHODS if plugin is None else _imported(plugin).METHODS
    return methods if name is None else {name: methods[name]}


def _imported(plugin: Path) -> ModuleType:
    folder = str(plugin.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(plugin.stem)


@pytest.fixture(scope="session")
def method_path(request) -> dict[str, str]:
    """Environment of a server that finds the tested methods."""
    plugin = request.config.getoption("--method-plugin")
    if plugin is None:
        return {}
    folders = [str(plugin.resolve().parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


@pytest.fixture(scope="session", autouse=True)
def cpu_engine() -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import is_cpu

    assert is_cpu(), "SGLang was imported for an accelerator before: run tests/conformance in a pytest of its own"
    load_plugins()


@pytest.fixture(scope="session")
def logs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def spelling_model(tmp_path_factory) -> Path:
    return write_spelling_model(tmp_path_factory.mktemp("spelling-model"))


@pytest.fixture(scope="session")
def datastore(logs) -> Iterator[DatastoreService]:
    """One service for the whole suite; what it has been told survives it."""
    data = logs / "datastore"
    data.mkdir()
    with serving(logs / "datastore.log", None, "--data", str(data)) as service:
        yield service
