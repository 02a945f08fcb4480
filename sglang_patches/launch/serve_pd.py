"""`make serve-pd`: a datastore, prefill instances, decode instances and a router in front of them, on this machine.

`python -m sglang_patches.launch.serve_pd [SGLang flags]` reads the variables of `serve` (PORT is the router's), and PREFILLS
and DECODES, the number of instances of each role (default 1). On GPUs instance i gets GPU i. Every instance gets the flags.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from . import serve
from .processes import Part, free_port, run_stack
from .serve import HOST, Settings, SettingsError


def count(environment: Mapping[str, str], variable: str) -> int:
    """How many instances; raises `SettingsError` naming the variable."""
    value = environment.get(variable) or "1"
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= 64:
        raise SettingsError(f"{variable}={value!r}: give a number of instances, 1 to 64")
    return int(value)


def instances(settings: Settings, prefills: int, decodes: int) -> list[Settings]:
    """One for each instance, each with its own ports."""
    roles = ["prefill"] * prefills + ["decode"] * decodes
    return [replace(settings, role=role, port=free_port(), bootstrap_port=free_port()) for role in roles]


def router_part(port: int, prefills: Mapping[int, int], decodes: Iterable[int]) -> Part:
    """`sglang_patches.launch.router` in front of instances of both roles on this machine. prefills: bootstrap port of each
    instance by its port. decodes: ports."""
    command = [sys.executable, "-m", "sglang_patches.launch.router"]
    command += ["--host", HOST, "--prometheus-port", str(free_port())]
    places = {
        "PREFILL": ",".join(f"{HOST}:{prefill}:{bootstrap}" for prefill, bootstrap in prefills.items()),
        "DECODE": ",".join(f"{HOST}:{decode}" for decode in decodes),
        "PORT": str(port),
    }
    return Part("router", command, places, lambda: serve.http_healthy(port, "readiness"))


def sizes(settings: Settings) -> tuple[int, int]:
    """How many prefill and decode instances; raises `SettingsError` for settings that cannot be split."""
    serve.refuse_split_head(settings)
    if settings.datastore == "embedded":
        raise SettingsError(
            "DATASTORE='embedded': instances cannot share an embedded datastore, give grpc or the address of a running one"
        )
    return count(os.environ, "PREFILLS"), count(os.environ, "DECODES")


def run(settings: Settings, extra: list[str]) -> NoReturn:
    """Serves until a signal and restarts processes that end. Raises `ChildDiedError` for a process that does not start."""
    prefills, decodes = sizes(settings)
    began = time.monotonic()
    settings = serve.with_models(settings)
    workers = instances(settings, prefills, decodes)
    prior = serve.build_prior(settings.model) if settings.needs_prior else None
    logs = Path(tempfile.mkdtemp(prefix="specstore-serve-"))
    parts = (
        [serve.datastore_part(prior, settings.datastore_port)] if prior and settings.starts_service else []
    )
    for index, worker in enumerate(workers):
        gpu = ["--base-gpu-id", str(index)] if settings.device == "cuda" else []
        name = f"{worker.role}-{index + 1}"
        parts.append(serve.engine_part(name, worker, prior, [*gpu, *extra]))
    prefilling = {worker.port: worker.bootstrap_port for worker in workers if worker.role == "prefill"}
    decoding = [worker.port for worker in workers if worker.role == "decode"]
    parts.append(router_part(settings.port, prefilling, decoding))
    run_stack(parts, logs, lambda: serve.announce(settings, time.monotonic() - began, logs), restarts=True)


if __name__ == "__main__":
    sys.exit(serve.main(run, split=True, check=sizes))
