"""`python -m tests.support.forked_check ARGUMENTS`: `python -m sglang_patches.check`, whose engines are forked from one process that has
SGLang imported."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path

from sglang_patches.check import engines
from tests.support.servers.engine import CPU_ENVIRONMENT, one_architecture
from tests.support.servers.forked import ForkedChild


class ForkedProcess(ForkedChild):
    """What an engine uses of a subprocess.Popen."""

    def poll(self) -> int | None:
        return self.status

    def wait(self, timeout: float | None = None) -> int:
        return super().wait(timeout)


class ForkedEngine(engines.Engine):
    def _start(self, command: Sequence[str], log: Path) -> ForkedProcess:
        environment = CPU_ENVIRONMENT | one_architecture()
        return ForkedProcess(log.stem, list(command), environment, log, show=False)


if __name__ == "__main__":
    engines.Engine = ForkedEngine
    runpy.run_module("sglang_patches.check", run_name="__main__", alter_sys=True)
