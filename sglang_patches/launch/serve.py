"""`make serve`: a datastore and an SGLang server that drafts from it, on this machine's GPU or CPU.

`python -m sglang_patches.launch.serve [SGLang flags]` reads MODEL, DRAFT_MODEL, EARLY_EXIT, PORT, ALGORITHM, DEVICE, DATASTORE, ROLE,
BOOTSTRAP_PORT and IB_DEVICE from the environment (see `Settings`). It makes a demo model when MODEL is not given, waits
until both processes are healthy, and stops both on Ctrl-C, on SIGTERM and when one of them ends.
"""

import argparse
import difflib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from datastore_service.endpoint import FORMS, parse_endpoints
from datastore_service.tls import Tls
from sglang_patches.demo.corpus import CORPUS
from sglang_patches.demo.folder import DemoModelError, cache_root
from sglang_patches.demo.model import ensure
from sglang_patches.demo.variant import deepened_target
from sglang_patches.methods.registry import ALGORITHMS, DEFAULT, HEADS, METHODS, current_name
from sglang_patches.namespace import tokenizer_file

from . import system
from .processes import ChildDiedError, Part, port_taken, run_stack

HOST = "127.0.0.1"
DATASTORE_PORT = 50061
DEVICES = ("cpu", "cuda")
ROLES = ("prefill", "decode")
PATH_STARTS = ("/", "./", "../", "~")  # no hub has such a name
BOOTSTRAP_PORT = 8998  # SGLang's own default
# A single CPU serves few requests at a time. Without a bound SGLang sizes its KV pool by the machine's whole memory.
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "specstore_cpu", "--sampling-backend", "pytorch"),
    *("--max-total-tokens", "16384", "--max-running-requests", "8"),
)

# A chain, as measured on a CPU. SGLang's own choice for a Llama is a tree of many rows.
CPU_HEAD_FLAGS = (
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)

# Instances that share cores must not spin while they wait: they would slow each other down tenfold and more.
CPU_SPLIT_ENVIRONMENT = {"MOONCAKE_PROTOCOL": "tcp", "OMP_WAIT_POLICY": "PASSIVE"}


class SettingsError(ValueError):
    """A variable has an unusable value; the message names it."""


@dataclass(frozen=True)
class Settings:
    """What the environment asks for."""

    model: str  # MODEL: folder or name of a model SGLang can load; "" for a demo model
    draft_model: str  # DRAFT_MODEL: the same of the model or the head that drafts; "" for none, or for the demo's beside a demo target
    early_exit: str  # EARLY_EXIT: file of the target's early exits; "" for none, or for the demo target's
    port: int  # PORT of the OpenAI endpoint
    algorithm: str  # ALGORITHM: any of --speculative-algorithm; NONE for plain decoding
    device: str  # DEVICE: cpu or cuda; "" for what the machine has
    # DATASTORE: grpc (a service started here), embedded (inside SGLang's process), or the address of a running one
    datastore: str
    role: str  # ROLE of an instance behind a router: prefill or decode; "" for an instance that does both
    bootstrap_port: int  # BOOTSTRAP_PORT: where decode instances reach a prefill instance
    ib_device: str  # IB_DEVICE: InfiniBand devices, separated by commas; "" for those that Mooncake finds
    datastore_port: int = DATASTORE_PORT  # of a service started here
    dtype: str = ""  # of weights and KV cache; "" for the model's own

    @property
    def has_draft_process(self) -> bool:
        """Whether the method drafts with a model in a process of its own."""
        return self.algorithm in METHODS and METHODS[self.algorithm].draft_process

    @property
    def has_head(self) -> bool:
        """Whether SGLang drafts in the target's process, and retrieval stands beside that."""
        return self.algorithm in HEADS

    @property
    def takes_draft_model(self) -> bool:
        """Whether a model, or the weights of a head, may be given to draft with."""
        return self.has_draft_process or self.has_head

    @property
    def needs_draft_model(self) -> bool:
        """Whether the method refuses to start without one."""
        return self.takes_draft_model and ALGORITHMS[self.algorithm].needs_draft_model

    @property
    def needs_early_exit(self) -> bool:
        """Whether the method reads an early exit of the target."""
        return self.algorithm in METHODS and METHODS[self.algorithm].early_exit

    @property
    def starts_service(self) -> bool:
        """Whether this command starts a datastore process."""
        return self.algorithm != "NONE" and self.datastore == "grpc"

    @property
    def needs_prior(self) -> bool:
        """Whether this command gives the datastore its prior."""
        return self.algorithm != "NONE" and self.datastore in ("grpc", "embedded")


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Raises `SettingsError` naming the variable and what it may be."""
    settings = Settings(
        model=environment.get("MODEL", ""),
        draft_model=environment.get("DRAFT_MODEL", ""),
        early_exit=environment.get("EARLY_EXIT", ""),
        port=_port(environment, "PORT", 30000),
        algorithm=current_name((environment.get("ALGORITHM") or DEFAULT).upper()),
        device=_choice(environment, "DEVICE", ("", *DEVICES)),
        datastore=_datastore(environment.get("DATASTORE") or "grpc"),
        role=_choice(environment, "ROLE", ("", *ROLES)),
        bootstrap_port=_port(environment, "BOOTSTRAP_PORT", BOOTSTRAP_PORT),
        ib_device=environment.get("IB_DEVICE", ""),
    )
    _check_draft_model(settings)
    _check_early_exit(settings)
    if settings.role:
        refuse_split_head(settings)
    return settings


def _check_draft_model(settings: Settings) -> None:
    if settings.draft_model and not settings.takes_draft_model:
        raise SettingsError(
            f"DRAFT_MODEL={settings.draft_model!r}: ALGORITHM={settings.algorithm} drafts without a model, leave it out"
        )
    if settings.has_head and not settings.needs_draft_model and not settings.model:
        raise SettingsError(
            f"MODEL='': ALGORITHM={settings.algorithm} drafts with what MODEL was trained with, and the demo model has no such head; "
            "EAGLE3 trains it one"
        )
    if settings.needs_draft_model and settings.model and not settings.draft_model:
        raise SettingsError(
            f"DRAFT_MODEL='': ALGORITHM={settings.algorithm} drafts with a model, give a small one with MODEL's tokenizer, or MODEL's head"
        )


def _check_early_exit(settings: Settings) -> None:
    if settings.early_exit and not settings.needs_early_exit:
        raise SettingsError(
            f"EARLY_EXIT={settings.early_exit!r}: ALGORITHM={settings.algorithm} has no early exit, leave it out"
        )
    if settings.needs_early_exit and settings.model and not settings.early_exit:
        raise SettingsError(
            f"EARLY_EXIT='': ALGORITHM={settings.algorithm} reads MODEL's early exit, make one with python -m sglang_patches.training exits"
        )


def refuse_split_head(settings: Settings) -> None:
    """Raises `SettingsError` for a head in instances that share a request: its states would have to move with the KV cache."""
    if settings.has_head:
        raise SettingsError(
            f"ALGORITHM={settings.algorithm}: a head with retrieval beside it runs in one instance, give one of {', '.join(METHODS)}"
        )


def _port(environment: Mapping[str, str], variable: str, default: int) -> int:
    port = environment.get(variable) or str(default)
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise SettingsError(f"{variable}={port!r}: give a port number, 1 to 65535")
    return int(port)


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


def refuse_unknown_algorithm(algorithm: str) -> None:
    """Raises `SettingsError` for one that neither specstore nor SGLang has, nor another of its plugins."""
    if algorithm == "NONE" or algorithm in METHODS:
        return
    # In a process of its own: plugins change SGLang where they are loaded.
    asked = subprocess.run([sys.executable, "-c", UNLESS_KNOWN, algorithm], capture_output=True, text=True)
    if names := asked.stdout.split():
        near = difflib.get_close_matches(algorithm, [*METHODS, *names], 1)
        hint = f", did you mean {near[0]}?" if near else f"; specstore's are {', '.join(METHODS)}"
        raise SettingsError(f"ALGORITHM={algorithm}: there is no such algorithm{hint}")


# Prints SGLang's own names if the one asked for is unknown.
UNLESS_KNOWN = """
import sys
from sglang.srt.plugins import load_plugins
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
load_plugins()
try:
    SpeculativeAlgorithm.from_string(sys.argv[1])
except ValueError:
    print(*SpeculativeAlgorithm.__members__)
"""


def refuse_missing_files(settings: Settings) -> None:
    """Raises `SettingsError` for a model or an early exit that is a path to nothing. Names of a hub are looked up later."""
    for variable, model in (("MODEL", settings.model), ("DRAFT_MODEL", settings.draft_model)):
        if model.startswith(PATH_STARTS) and not Path(model).is_dir():
            raise SettingsError(f"{variable}={model}: no such folder")
    if settings.early_exit and not Path(settings.early_exit).is_file():
        raise SettingsError(f"EARLY_EXIT={settings.early_exit}: no such file")


def refuse_missing_packages() -> None:
    """Raises `SettingsError` for what instances that share a request need of the system: SGLang would say it minutes later, in a
    traceback."""
    if line := system.lacking(*system.SPLIT):
        raise SettingsError(line)


def refuse_taken_ports(settings: Settings) -> None:
    """Raises `SettingsError` for a port that another process holds."""
    if port_taken(settings.port):
        raise SettingsError(f"PORT={settings.port}: the port is taken, give another one")
    if settings.starts_service and port_taken(settings.datastore_port):
        raise SettingsError(
            f"port {settings.datastore_port} is taken, which the datastore needs: stop the other one, or DATASTORE=embedded"
        )


def datastore_command(prior: Path, port: int = DATASTORE_PORT) -> list[str]:
    """`specstore serve` on loopback with the prior."""
    return [*SPECSTORE, "serve", "--listen", f"{HOST}:{port}", "--prior", str(prior)]


SPECSTORE = (sys.executable, "-m", "datastore_service.cli.main")


def with_models(settings: Settings) -> Settings:
    """The settings with the demo's models where none is given, made on first use. A method that drafts with a model gets a target
    that costs several times its draft and says the same."""
    if settings.model:
        return settings
    if settings.algorithm == "EAGLE3":
        return replace(settings, model=str(ensure()), draft_model=settings.draft_model or _demo_head())
    if not settings.has_draft_process and settings.algorithm != "STANDALONE":
        return replace(settings, model=str(ensure()))
    draft = settings.draft_model or str(ensure())
    return replace(
        settings, model=str(deepened_target()), draft_model=draft, early_exit=_early_exit(settings)
    )


def _early_exit(settings: Settings) -> str:
    """The early exit's file for the demo's target: the given one, else one that is made on first use. Empty where the method reads none."""
    if settings.early_exit or not settings.needs_early_exit:
        return settings.early_exit
    from .trained import deepened_exits  # imports torch

    return str(deepened_exits())


def _demo_head() -> str:
    """The folder of the demo model's EAGLE-3 head."""
    from .trained import demo_head  # imports torch

    return str(demo_head())


def engine_command(settings: Settings, prior: Path | None, extra: list[str]) -> list[str]:
    """`sglang.launch_server` with the flags of method, datastore and device; `extra` flags win. settings: with models."""
    command = [sys.executable, "-W", "ignore::UserWarning", "-m", "sglang.launch_server"]
    command += ["--model-path", settings.model, "--host", HOST, "--port", str(settings.port)]
    if settings.device == "cpu":
        command += CPU_FLAGS
    if settings.dtype:
        command += ["--dtype", settings.dtype]
    if settings.role:
        command += role_flags(settings.role, settings.device, settings.bootstrap_port)
        command += ["--disaggregation-ib-device", settings.ib_device] if settings.ib_device else []
    if settings.algorithm != "NONE":
        command += ["--speculative-algorithm", settings.algorithm]
        command += ["--specstore-endpoint", endpoint(settings)]
    if settings.has_head:
        command += ["--specstore-beside-head", *(CPU_HEAD_FLAGS if settings.device == "cpu" else ())]
    if settings.draft_model:
        command += ["--speculative-draft-model-path", settings.draft_model]
    if settings.early_exit:
        command += ["--specstore-early-exit", settings.early_exit]
    if settings.datastore == "embedded" and prior:
        command += ["--specstore-prior", str(prior)]
    return command + extra


def role_flags(role: str, device: str, bootstrap_port: int) -> list[str]:
    """The flags that make an instance a prefill or a decode instance."""
    words = ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "mooncake"]
    if role == "prefill":
        return [*words, "--disaggregation-bootstrap-port", str(bootstrap_port)]
    if device != "cpu":
        return words
    from sglang_patches.host.versions import host  # needs SGLang, the launcher of a datastore does not

    return [*words, *host.CPU_DECODE_FLAGS]


def endpoint(settings: Settings) -> str:
    """The endpoint at which the engine finds its datastore."""
    return f"{HOST}:{settings.datastore_port}" if settings.datastore == "grpc" else settings.datastore


def engine_environment(settings: Settings) -> dict[str, str]:
    """SGLang chooses its CPU engine by environment variable."""
    if settings.device != "cpu":
        return {}
    return {"SGLANG_USE_CPU_ENGINE": "1"} | (CPU_SPLIT_ENVIRONMENT if settings.role else {})


def detect_device() -> str:
    """`cuda` when torch sees a GPU, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def suitable_dtype(device: str) -> str:
    """bfloat16 on a GPU and if this processor multiplies it, else float32: with bfloat16 in software each row of a step costs as much as
    the first, so that neither a batch nor speculation gains anything."""
    if device != "cpu":
        return "bfloat16"
    from sglang_patches.cpu.packed_weights import multiplies_bfloat16  # imports torch

    return "bfloat16" if multiplies_bfloat16() else "float32"


def on_this_machine(settings: Settings, flags: list[str], cpu_dtype: str) -> Settings:
    """The settings with a device and a dtype. flags: SGLang's, whose --dtype wins. cpu_dtype: on a CPU, "" for what it multiplies
    fastest."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dtype", default="")
    device = settings.device or detect_device()
    default = (cpu_dtype or suitable_dtype(device)) if device == "cpu" else ""
    return replace(settings, device=device, dtype=parser.parse_known_args(flags)[0].dtype or default)


def model_tokenizer(model: str) -> Path:
    """The model's tokenizer.json; raises `SettingsError` if there is none."""
    try:
        return tokenizer_file(model)
    except ValueError as error:
        raise SettingsError(f"MODEL={model}: {error}") from None


def build_prior(model: str) -> Path:
    """A prior from the shipped answers in this model's tokens; kept for the next start."""
    tokenizer = model_tokenizer(model)
    priors = cache_root() / "priors"
    prior = priors / hashlib.sha256(tokenizer.read_bytes() + CORPUS.read_bytes()).hexdigest()[:16]
    if not prior.exists():
        print(f"serve: building a prior from {CORPUS.name} in {prior}", file=sys.stderr, flush=True)
        priors.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=priors) as work:
            built = Path(work) / prior.name
            command = [*SPECSTORE, "build", "--tokenizer", str(tokenizer), "--out", str(built), str(CORPUS)]
            subprocess.run(command, check=True)
            built.rename(prior)
    else:  # it may have an older format
        subprocess.run([*SPECSTORE, "upgrade", str(prior)], check=True, stdout=subprocess.DEVNULL)
    return prior


def http_healthy(port: int, path: str = "health") -> bool:
    """Whether an instance (loaded, and warmed up with a first request) or a router answers its check."""
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"http://{HOST}:{port}/{path}", timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


def datastore_healthy(port: int = DATASTORE_PORT, tls: Tls | None = None) -> bool:
    """Whether the datastore's gRPC health service says SERVING. tls: of this client."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from datastore_service.client.channel import open_channel

    with open_channel(f"{HOST}:{port}", tls) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return False
    return reply.status == health_pb2.HealthCheckResponse.SERVING


def run(settings: Settings, extra: list[str]) -> NoReturn:
    """Serves until a signal or until a child ends. Raises `ChildDiedError` in the latter case."""
    began = time.monotonic()
    settings = with_models(settings)
    prior = build_prior(settings.model) if settings.needs_prior else None
    logs = Path(tempfile.mkdtemp(prefix="specstore-serve-"))
    parts = [datastore_part(prior, settings.datastore_port)] if prior and settings.starts_service else []
    parts.append(engine_part("engine", settings, prior, extra))
    run_stack(parts, logs, lambda: announce(settings, time.monotonic() - began, logs))


def datastore_part(prior: Path, port: int) -> Part:
    """The datastore service, to be started first."""
    return Part("datastore", datastore_command(prior, port), {}, lambda: datastore_healthy(port))


def engine_part(name: str, settings: Settings, prior: Path | None, extra: list[str]) -> Part:
    """An SGLang instance."""
    command = engine_command(settings, prior, extra)
    return Part(name, command, engine_environment(settings), lambda: http_healthy(settings.port))


def where(settings: Settings) -> str:
    """The device, and the dtype unless it is the model's own."""
    return f"{settings.device} in {settings.dtype}" if settings.dtype else settings.device


def announce(settings: Settings, seconds: float, logs: Path) -> None:
    drafting = (
        "plain decoding"
        if settings.algorithm == "NONE"
        else f"{settings.algorithm}, datastore {endpoint(settings)}"
    )
    url = f"http://{HOST}:{settings.port}/v1"
    print(
        f"\nready in {seconds:.0f} s on {where(settings)}: {url} ({drafting}); logs in {logs}\n\n"
        f"  curl {url}/chat/completions -H 'Content-Type: application/json' \\\n"
        """    -d '{"model": "default", "max_tokens": 64, "temperature": 0,"""
        """ "messages": [{"role": "user", "content": "Why do leaves change color in autumn?"}]}'\n\n"""
        "Ctrl-C stops it.",
        flush=True,
    )


def _stop(number: int, frame: object) -> None:
    # Once: a second Ctrl-C must not interrupt the stopping of the children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)


def sglang_flags(words: list[str]) -> list[str]:
    """The words, which are SGLang's, unless they ask for help: then prints what the launcher that runs is, and ends."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags of SGLang]",
        description=sys.modules["__main__"].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser.parse_known_args(words)[1]


def main(
    run: Callable[[Settings, list[str]], NoReturn] = run,
    datastore_port: int = DATASTORE_PORT,
    cpu_dtype: str = "",
    split: bool = False,
    check: Callable[[Settings], object] = lambda settings: None,
) -> int:
    """Runs what the environment asks for. Returns the exit status and prints an error on standard error. datastore_port: of a
    service that it starts. cpu_dtype: as of `on_this_machine`. split: whether it starts prefill and decode instances. check: raises
    `SettingsError` for what else `run` cannot serve."""
    flags = sglang_flags(sys.argv[1:])
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    try:
        settings = replace(read_settings(os.environ), datastore_port=datastore_port)
        if split or settings.role:
            refuse_missing_packages()
        refuse_unknown_algorithm(settings.algorithm)
        refuse_missing_files(settings)
        check(settings)
        refuse_taken_ports(settings)
        run(on_this_machine(settings, flags, cpu_dtype), flags)
    except (SettingsError, DemoModelError, ChildDiedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):  # so that Python does not try again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 128 + signal.SIGPIPE
    except subprocess.CalledProcessError as error:
        print(f"error: building the prior failed with status {error.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
