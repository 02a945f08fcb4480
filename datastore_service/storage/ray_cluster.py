"""Builds the parts of a corpus on the machines of a Ray cluster."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from datastore_service.storage.parts import Built, Part, Recipe, build_part

LOCAL = "local"  # in place of an address: a cluster on this machine, for as long as the build takes
CONNECT_SECONDS = 5.0
CHECK_SECONDS = 60.0  # the check imports Ray
ATTEMPTS = 4  # to build a part
TASKS_PER_CORE = 2  # in the cluster at a time; finished ones wait there for the parts before them


class RayCluster:
    """A connection to a cluster, closed at the end of the `with` block. `build` is a PartBuilder.

    Each part is a task for one core. Ray repeats the task of a worker or a machine that is lost; a part has the same segments each
    time. Every machine must have the same version of specstore, and the corpus under the same paths.

    address: HOST:PORT of the cluster's head, or LOCAL. Raises ValueError for an address of another form, OSError if Ray is
    not installed or nothing that is Ray answers."""

    def __init__(self, address: str) -> None:
        self._ray = _installed_ray()
        if address == LOCAL:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a build reports to nobody
            options: dict[str, Any] = {"include_dashboard": False}
        else:
            _check_answers(address)
            options = {}
        self._ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **options)

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def build(self, recipe: Recipe, parts: Sequence[Part]) -> Iterator[Built]:
        """Builds the parts, and yields them in their order. Raises what `build_part` raises, OSError for a part whose workers died ATTEMPTS times."""
        task = self._ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(_build_on_worker)
        shared = self._ray.put(recipe)
        started = ((part, task.remote(shared, _absolute(part))) for part in parts)
        running = deque(islice(started, TASKS_PER_CORE * self._cores()))
        while running:
            yield from self._collect(*running.popleft())
            running.extend(islice(started, 1))

    def _collect(self, part: Part, references: Any) -> Iterator[Built]:
        """The segments of a task, one at a time, as they are ready. references: Ray's generator of object references."""
        for reference in references:
            try:
                built = self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except self._ray.exceptions.RayError as error:
                first, *_ = str(error).splitlines()
                raise OSError(
                    f"ray: the part that begins with {part.paths[0]} was not built: {first}"
                ) from error
            yield built

    def _cores(self) -> int:
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))


def _build_on_worker(recipe: Recipe, part: Part) -> Iterator[Built]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the machine's other cores have tasks of their own
    yield from build_part(recipe, part, threads=1)


def _absolute(part: Part) -> Part:
    """A worker has another working directory."""
    return replace(part, paths=tuple(path.absolute() for path in part.paths))


def _installed_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise OSError("ray: is not installed; `pip install specstore[ray]` installs it") from error


def _check_answers(address: str) -> None:
    """Ray itself would wait for minutes."""
    try:
        socket.create_connection(_host_and_port(address), CONNECT_SECONDS).close()
    except OSError as error:
        raise OSError(f"ray: {address} does not answer: {error.strerror or error}") from error
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        subprocess.run(command, capture_output=True, timeout=CHECK_SECONDS, check=True)
    except subprocess.SubprocessError as error:
        raise OSError(f"ray: {address} does not answer as the head of a Ray cluster") from error


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or "/" in host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"ray: {address!r} is neither HOST:PORT nor {LOCAL!r}")
    return host, int(port)
