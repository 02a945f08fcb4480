"""What the images install."""

import re
import shlex
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
EXCLUDED = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["exclude-dependencies"])


def installs(dockerfile: Path) -> list[list[str]]:
    """The words after `pip install` of each command."""
    text = dockerfile.read_text().replace("\\\n", " ")
    return [shlex.split(words) for words in re.findall(r"pip install ([^&\n]*)", text)]


def needed(names: set[str]) -> set[str]:
    """The packages and all that they depend on, as far as it is installed here."""
    found: set[str] = set()
    while names:
        found |= names
        below = {Requirement(line) for name in names for line in _requires(name)}
        names = {
            r.name.lower() for r in below if r.marker is None or r.marker.evaluate({"extra": ""})
        } - found
    return found


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:  # left out of the lock
        return []


@pytest.mark.parametrize("name", ["engine", "datastore"])
def test_no_image_compiles_llama_cpp(name):
    commands = installs(ROOT / "docker" / f"{name}.Dockerfile")
    assert commands
    for words in commands:
        if "--no-deps" not in words:
            packages = {Requirement(word).name for word in words if re.match(r"[a-z][\w-]*([=<>].*)?$", word)}
            assert not needed(packages) & EXCLUDED, words
