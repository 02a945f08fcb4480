"""`-p tests.progress --progress FILE`: pytest writes to FILE how far it is, for who waits for several of them (`tests.lanes`).

The first line has two numbers: tests that it will run, and tests that `--part` left for later. Each further line is a test that is
over: its name if it failed, else empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.parts import LEFT


@dataclass(frozen=True)
class Progress:
    """What such a file says."""

    total: int
    left: int
    done: int
    failed: list[str]


def read(path: Path) -> Progress | None:
    """None before the tests are collected."""
    lines = path.read_text().split("\n") if path.exists() else []
    if len(lines) < 2:
        return None
    total, left = map(int, lines[0].split())
    return Progress(total, left, len(lines) - 2, list(filter(None, lines[1:-1])))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", type=Path, required=True, metavar="FILE", help="where to write progress")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Writer(config.getoption("--progress")))


class Writer:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        left = session.config.stash.get(LEFT, 0)
        self._write(f"{len(session.items)} {left}")
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(nodeid if nodeid in self._failed else "")

    def _write(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(line + "\n")
