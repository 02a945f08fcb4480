"""What `make dist` makes: the files travel that should, and the installed wheel serves."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from datastore_service import __file__ as package
from sglang_patches.launch.processes import Child, free_port, wait_until

CHECKOUT = Path(package).parents[1]
PACKAGES = ["datastore_service", "proto_gen", "protos", "sglang_patches"]
BESIDE = [".gitignore", "LICENSE", "README.md", "pyproject.toml"]  # of an sdist
START_SECONDS = 240.0  # compiles the kernels
NOT_OF_THE_BASE = {"torch", "sglang", "transformers"}


def run(command: list, folder: Path, **variables: str) -> str:
    """Runs it outside the checkout, without its packages, and returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(source: Path, out: Path, *words: str) -> None:
    # Without isolation nothing is downloaded; `make dist` isolates.
    command = [sys.executable, "-m", "build", "--no-isolation", *words, "--outdir", str(out), str(source)]
    done = subprocess.run(command, cwd=out.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it."""
    pytest.importorskip("build", reason="needs build")
    pytest.importorskip("hatchling", reason="needs hatchling, which builds the package")
    folder = tmp_path_factory.mktemp("build") / "dist"
    built(CHECKOUT, folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def files_of_the_checkout(*paths: str) -> set[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    return {name for name in listed if name and (CHECKOUT / name).exists()}


def test_the_sdist_has_the_packages_and_what_builds_them(dist):
    with tarfile.open(dist[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names == files_of_the_checkout(*PACKAGES, *BESIDE) | {"PKG-INFO"}


def test_the_wheel_has_the_packages(dist):
    with zipfile.ZipFile(dist[1]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = files_of_the_checkout(*PACKAGES) - {"sglang_patches/cpu/common_ops.py"}
    assert names == {name.replace("protos/", "proto_gen/") for name in files} | {"common_ops.py"}


def test_the_wheel_of_the_sdist_is_the_wheel_of_the_checkout(dist, tmp_path):
    built(CHECKOUT, tmp_path / "direct", "--wheel")
    (direct,) = (tmp_path / "direct").iterdir()
    assert direct.name == dist[1].name
    assert direct.read_bytes() == dist[1].read_bytes()


@pytest.mark.long  # installs from a package index and compiles the kernels
def test_the_installed_base_serves(dist, tmp_path):
    venv, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    run([sys.executable, "-m", "venv", venv], empty)
    pip = [venv / "bin" / "python", "-m", "pip"]
    run([*pip, "install", "--quiet", "--constraint", CHECKOUT / "requirements" / "lock.txt", dist[1]], empty)
    run([*pip, "check"], empty)
    listed = {line.partition("==")[0].lower() for line in run([*pip, "freeze"], empty).splitlines()}
    assert "grpcio" in listed
    assert not listed & NOT_OF_THE_BASE

    imported = run([venv / "bin" / "python", "-c", "import datastore_service as d; print(d.__file__)"], empty)
    assert Path(imported.strip()).is_relative_to(venv)
    specstore = venv / "bin" / "specstore"
    version = dist[1].name.split("-")[1]
    assert run([specstore, "--version"], empty).strip() == version
    assert "serve" in run([specstore, "--help"], empty)
    endpoint = f"127.0.0.1:{free_port()}"
    alone = {"PYTHONPATH": "", "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    words = [str(specstore), "serve", "--listen", endpoint]
    service = Child("datastore", words, alone, tmp_path / "log", show=False)

    def serving() -> bool:
        asked = subprocess.run(
            [specstore, "health", "--endpoint", endpoint],
            capture_output=True,
            env=os.environ | alone,
            cwd=empty,
        )
        return asked.stdout == b"SERVING\n"

    try:
        wait_until(serving, [service], poll_seconds=1.0, seconds=START_SECONDS)
    finally:
        service.kill()
