"""`make demo`: a page that has the same question answered by plain decoding and by one of specstore's methods.

`python -m sglang_patches.launch.demo [SGLang flags]` reads the variables of `serve`; PORT is the page's. It starts a datastore
and two SGLang servers, both with the flags, on free ports, and the page server. It stops everything on Ctrl-C, on SIGTERM and when a
part ends.
"""

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from sglang_patches.methods.registry import ALGORITHMS

from . import serve
from .processes import Part, free_port, run_stack
from .serve import HOST, Settings, SettingsError

# The server that waits must leave the cores to the one that answers.
SHARED_FLAGS = ("--sleep-on-idle",)
# Of the GPU memory that is free when a server starts: two servers share a GPU.
GPU_FLAGS = ("--mem-fraction-static", "0.4")


def check(settings: Settings) -> None:
    """Raises `SettingsError` for what the page cannot show."""
    if settings.algorithm not in ALGORITHMS:
        raise SettingsError(
            f"ALGORITHM={settings.algorithm}: the page compares plain decoding with one of {', '.join(ALGORITHMS)}"
        )
    if settings.role:
        raise SettingsError(
            f"ROLE={settings.role!r}: the page has no prefill and decode instances, leave it out"
        )


def plain(settings: Settings) -> Settings:
    """The same target without a method."""
    return replace(settings, algorithm="NONE", draft_model="", early_exit="")


def behind(settings: Settings) -> Settings:
    """On a free port that the page and the datastore do not need."""
    taken = settings.port, settings.datastore_port
    return replace(settings, port=next(port for port in iter(free_port, None) if port not in taken))


def page_part(settings: Settings, tokenizer: Path, plain_port: int, method_port: int) -> Part:
    """The page server. settings: of the method, with the page's port. tokenizer: the model's tokenizer.json."""
    command = [sys.executable, "-m", "sglang_patches.launch.demo_page"]
    command += ["--port", str(settings.port), "--model", settings.model, "--method", settings.algorithm]
    command += ["--tokenizer", str(tokenizer)]
    command += ["--plain-port", str(plain_port), "--method-port", str(method_port)]
    return Part("page", command, {}, lambda: serve.http_healthy(settings.port, "settings"))


def parts_of(settings: Settings, tokenizer: Path, prior: Path | None, extra: list[str]) -> list[Part]:
    """The demo's processes in the order of their start.

    settings: with models and device.
    """
    flags = [*SHARED_FLAGS, *(GPU_FLAGS if settings.device == "cuda" else ()), *extra]
    servers = {"plain": behind(plain(settings)), "method": behind(settings)}
    parts = (
        [serve.datastore_part(prior, settings.datastore_port)] if prior and settings.starts_service else []
    )
    for name, server in servers.items():
        parts.append(serve.engine_part(name, server, prior if server.needs_prior else None, flags))
    return [*parts, page_part(settings, tokenizer, servers["plain"].port, servers["method"].port)]


def run(settings: Settings, extra: list[str]) -> NoReturn:
    """Serves until a signal or until a part ends. Raises `ChildDiedError` in the latter case, `SettingsError` for settings
    that the page cannot show."""
    check(settings)
    began = time.monotonic()
    settings = serve.with_models(settings)
    tokenizer = serve.model_tokenizer(settings.model)
    prior = serve.build_prior(settings.model) if settings.needs_prior else None
    logs = Path(tempfile.mkdtemp(prefix="specstore-demo-"))
    # A server sizes its KV cache by the GPU memory that is free: the one before it must have taken its own.
    in_turn = settings.device == "cuda"
    run_stack(
        parts_of(settings, tokenizer, prior, extra),
        logs,
        lambda: announce(settings, time.monotonic() - began, logs),
        in_turn=in_turn,
    )


def announce(settings: Settings, seconds: float, logs: Path) -> None:
    print(
        f"\nready in {seconds:.0f} s on {serve.where(settings)}: http://{HOST}:{settings.port}/ "
        f"(plain decoding and {settings.algorithm}); logs in {logs}\n\n"
        "Open it in a browser of this machine. Ctrl-C stops it.",
        flush=True,
    )


if __name__ == "__main__":
    # `make serve` may have the usual port. The page says whether the two answers are identical, which they are in float32.
    sys.exit(serve.main(run, free_port(), cpu_dtype="float32"))
