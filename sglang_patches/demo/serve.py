"""`make serve`: a datastore and an SGLang server that drafts from it, on whatever this machine has.

`python -m sglang_patches.demo.serve [SGLang flags]` reads MODEL, PORT, ALGORITHM, DEVICE and DATASTORE from the
environment (see `Settings`). It makes the demo model when MODEL is not given, waits until both processes are healthy,
and stops both on Ctrl-C, on SIGTERM and when one of them ends.
"""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from datastore_service.endpoint import FORMS, parse_endpoints
from sglang_patches.tokenizer_file import tokenizer_file

from .corpus import CORPUS
from .errors import DemoModelError
from .model import ensure
from .paths import cache_root
from .processes import Child, ChildDiedError, port_taken, require_running, wait_until

HOST = "127.0.0.1"
DATASTORE_PORT = 50061
DEVICES = ("cpu", "cuda")
# A single CPU serves few requests at a time; SGLang would size its KV pool by the whole memory of the machine.
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "specstore_cpu", "--sampling-backend", "pytorch"),
    *("--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "8"),
)


class SettingsError(ValueError):
    """A variable with a value that cannot be served; the message names it."""


@dataclass(frozen=True)
class Settings:
    """What the environment asks for."""

    model: str  # MODEL: folder or name of a model SGLang can load; "" for the demo model
    port: int  # PORT of the OpenAI endpoint
    algorithm: str  # ALGORITHM: SSSD, or any of --speculative-algorithm; NONE for plain decoding
    device: str  # DEVICE: cpu or cuda; "" for what the machine has
    # DATASTORE: grpc (a service started here), embedded (inside SGLang's process), or where one already runs
    datastore: str

    @property
    def starts_service(self) -> bool:
        """Whether a datastore process is part of this."""
        return self.algorithm != "NONE" and self.datastore == "grpc"

    @property
    def needs_prior(self) -> bool:
        """Whether the datastore is ours to fill."""
        return self.algorithm != "NONE" and self.datastore in ("grpc", "embedded")


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Raises `SettingsError` naming the variable and what it may be."""
    port = environment.get("PORT") or "30000"
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise SettingsError(f"PORT={port!r}: give a port number, 1 to 65535")
    return Settings(
        model=environment.get("MODEL", ""),
        port=int(port),
        algorithm=(environment.get("ALGORITHM") or "SSSD").upper(),
        device=_choice(environment, "DEVICE", ("", *DEVICES)),
        datastore=_datastore(environment.get("DATASTORE") or "grpc"),
    )


def _datastore(value: str) -> str:
    if value not in ("grpc", "embedded"):
        try:
            parse_endpoints(value)
        except ValueError:
            raise SettingsError(f"DATASTORE={value!r}: give grpc, embedded or {FORMS}") from None
    return value


def _choice(environment: Mapping[str, str], variable: str, choices: tuple[str, ...]) -> str:
    value = environment.get(variable) or choices[0]
    if value not in choices:
        raise SettingsError(f"{variable}={value!r}: give one of {', '.join(c for c in choices if c)}")
    return value


def refuse_taken_ports(settings: Settings) -> None:
    """Raises `SettingsError` for a port that another process holds."""
    if port_taken(settings.port):
        raise SettingsError(f"PORT={settings.port}: the port is taken, give another one")
    if settings.starts_service and port_taken(DATASTORE_PORT):
        raise SettingsError(
            f"port {DATASTORE_PORT} is taken, which the datastore needs: stop the other one, or DATASTORE=embedded"
        )


def datastore_command(prior: Path, port: int = DATASTORE_PORT) -> list[str]:
    """`specstore serve` on loopback with the prior."""
    return [*SPECSTORE, "serve", "--listen", f"{HOST}:{port}", "--prior", str(prior)]


SPECSTORE = (sys.executable, "-m", "datastore_service.cli.main")


def engine_command(settings: Settings, model: str, prior: Path | None, extra: list[str]) -> list[str]:
    """`sglang.launch_server` with the method, the datastore's place and what the device needs; `extra` flags win."""
    command = [sys.executable, "-W", "ignore::UserWarning", "-m", "sglang.launch_server"]
    command += ["--model-path", model, "--host", HOST, "--port", str(settings.port)]
    if settings.device == "cpu":
        command += CPU_FLAGS
    if settings.algorithm != "NONE":
        command += ["--speculative-algorithm", settings.algorithm]
        command += ["--specstore-endpoint", endpoint(settings)]
    if settings.datastore == "embedded" and prior:
        command += ["--specstore-prior", str(prior)]
    return command + extra


def endpoint(settings: Settings) -> str:
    """Where the engine finds its datastore."""
    return f"{HOST}:{DATASTORE_PORT}" if settings.datastore == "grpc" else settings.datastore


def engine_environment(settings: Settings) -> dict[str, str]:
    """SGLang chooses its CPU engine by environment variable."""
    return {"SGLANG_USE_CPU_ENGINE": "1"} if settings.device == "cpu" else {}


def detect_device() -> str:
    """`cuda` when torch sees a GPU, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def build_prior(model: str) -> Path:
    """A prior from the shipped answers in this model's tokens; kept for the next start."""
    try:
        tokenizer = tokenizer_file(model)
    except ValueError as error:
        raise SettingsError(f"MODEL={model}: {error}") from None
    priors = cache_root() / "priors"
    prior = priors / hashlib.sha256(tokenizer.read_bytes() + CORPUS.read_bytes()).hexdigest()[:16]
    if not prior.exists():
        _say(f"building a prior from {CORPUS.name} in {prior}")
        priors.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=priors) as work:
            built = Path(work) / prior.name
            command = [*SPECSTORE, "build", "--tokenizer", str(tokenizer), "--out", str(built), str(CORPUS)]
            subprocess.run(command, check=True)
            built.rename(prior)
    else:  # it may be of an earlier version's format
        subprocess.run([*SPECSTORE, "upgrade", str(prior)], check=True, stdout=subprocess.DEVNULL)
    return prior


def engine_healthy(port: int) -> bool:
    """Whether SGLang answers its health check: loaded, and warmed up with a first request."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


def datastore_healthy(port: int = DATASTORE_PORT) -> bool:
    """Whether the datastore's gRPC health service says SERVING."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return False
    return reply.status == health_pb2.HealthCheckResponse.SERVING


def run(settings: Settings, extra: list[str]) -> None:
    """Serves until a signal or until a child ends. Raises `ChildDiedError` in the latter case."""
    began = time.monotonic()
    model = settings.model or str(ensure())
    prior = build_prior(model) if settings.needs_prior else None
    logs = Path(tempfile.mkdtemp(prefix="specstore-serve-"))
    children: list[Child] = []
    try:
        if settings.starts_service:
            children.append(Child("datastore", datastore_command(prior), {}, logs / "datastore.log"))
        command = engine_command(settings, model, prior, extra)
        children.append(Child("engine", command, engine_environment(settings), logs / "engine.log"))
        if settings.starts_service:
            wait_until(datastore_healthy, children)
        wait_until(lambda: engine_healthy(settings.port), children)
        _announce(settings, time.monotonic() - began, logs)
        while True:
            require_running(children)
            time.sleep(0.5)
    finally:
        # The engine first: it would count the datastore's going as a failure.
        for child in reversed(children):
            _say(f"stopping {child.name}")
            child.stop()


def _announce(settings: Settings, seconds: float, logs: Path) -> None:
    drafting = (
        "plain decoding"
        if settings.algorithm == "NONE"
        else f"{settings.algorithm}, datastore {endpoint(settings)}"
    )
    url = f"http://{HOST}:{settings.port}/v1"
    print(
        f"\nready in {seconds:.0f} s on {settings.device}: {url} ({drafting}); logs in {logs}\n\n"
        f"  curl {url}/chat/completions -H 'Content-Type: application/json' \\\n"
        """    -d '{"model": "default", "max_tokens": 64, "temperature": 0,"""
        """ "messages": [{"role": "user", "content": "Why do leaves change color in autumn?"}]}'\n\n"""
        "Ctrl-C stops it.",
        flush=True,
    )


def _say(text: str) -> None:
    print(f"serve: {text}", file=sys.stderr, flush=True)


def _stop(number: int, frame: object) -> None:
    # Once: a second Ctrl-C must not interrupt the stopping of the children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)


def main() -> int:
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    try:
        settings = read_settings(os.environ)
        refuse_taken_ports(settings)
        if not settings.device:
            settings = Settings(**(vars(settings) | {"device": detect_device()}))
        run(settings, sys.argv[1:])
    except (SettingsError, DemoModelError, ChildDiedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"error: building the prior failed with status {error.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
