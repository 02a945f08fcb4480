"""Real SGLang servers, started and stopped by benchmarks and by the tests that need one."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import requests

from sglang_patches.launch.processes import PROXIES, Child, free_port, wait_until
from sglang_patches.methods.registry import HEADS, METHODS

START_SECONDS = 600.0
DEVICE = os.environ.get("DEVICE") or "cpu"  # of every server: cpu or cuda
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1"}
CPU_FLAGS = ("--attention-backend", "specstore_cpu", "--sampling-backend", "pytorch")
ARCHITECTURES = {
    "llama",
    "llama_eagle",
    "llama_eagle3",
    "mimo",
    "mimo_mtp",
    "qwen2",
}  # SGLang's modules for every model the tests and benchmarks start
HEAD_STEPS = 3  # tokens that a head drafts beside retrieval


@functools.cache
def one_architecture() -> dict[str, str]:
    """Environment for a quicker start: importing all of its 250 model modules takes SGLang a quarter of its start."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    (package,) = spec.submodule_search_locations
    modules = (
        {path.stem for path in Path(package, "srt", "models").glob("*.py")} - ARCHITECTURES - {"registry"}
    )
    return {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(sorted(modules))}


@dataclass(frozen=True)
class ServerSpec:
    """One SGLang configuration. algorithm: None for plain decoding. nodes: drafted tokens a step; a chain with one of SGLang's heads alone.
    draft: its weights, or the model of a draft process. flags: further command-line words. beside_head: whether retrieval stands beside
    the head, which then drafts HEAD_STEPS tokens deep. branches: of the head's trees, 1 for chains."""

    name: str
    model: Path
    algorithm: str | None = None
    dtype: str = "bfloat16"
    nodes: int = 15
    draft: Path | None = None
    flags: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    max_running_requests: int = 16
    max_total_tokens: int = 32768
    overlap: bool = True
    beside_head: bool = False
    branches: int = 1

    def command(self, port: int) -> list[str]:
        words = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model)]
        words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", self.dtype, "--sleep-on-idle"]
        words += ["--max-running-requests", str(self.max_running_requests)]
        # The tokens alone set the cache's size. The fraction leaves room for servers that load at the same time.
        words += ["--max-total-tokens", str(self.max_total_tokens), "--mem-fraction-static", "0.8"]
        words += ["--device", DEVICE, *(CPU_FLAGS if DEVICE == "cpu" else ())]
        words += [] if self.overlap else ["--disable-overlap-schedule"]
        words += self._speculation()
        return [*words, *self.flags]

    def _speculation(self) -> list[str]:
        if self.algorithm is None:
            return []
        words = ["--speculative-algorithm", self.algorithm]
        words += ["--speculative-draft-model-path", str(self.draft)] if self.draft else []
        rows = ["--speculative-num-draft-tokens", str(self.nodes + 1)]
        if self.algorithm == "NGRAM":
            return [*words, *rows]
        if self.algorithm in HEADS and not self.beside_head:
            return [*words, *_head(self.nodes)]
        words += ["--specstore-nodes", str(self.nodes)]
        if self.beside_head:
            words += ["--specstore-beside-head", *_head(HEAD_STEPS, self.branches)]
        # One GPU is enough: the draft model shares the target's.
        method = METHODS.get(self.algorithm)
        shares = DEVICE != "cpu" and self.draft and method and not method.draft_device
        return [*words, *(["--specstore-draft-device", f"{DEVICE}:0"] if shares else [])]


def _head(steps: int, branches: int = 1) -> list[str]:
    """SGLang's flags of a head that drafts so many tokens deep."""
    words = ["--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(branches)]
    return [*words, "--speculative-num-draft-tokens", str(branches * steps + 1)]


class StreamFailedError(requests.RequestException):
    """A streamed answer that says it failed, or that breaks off."""


class Endpoint:
    """Where requests go; `url` is its base address. timeout: seconds without a byte."""

    def __init__(self, url: str, timeout: float = START_SECONDS) -> None:
        self.url, self.timeout = url, timeout

    def generate(self, input_ids: Sequence[int], **sampling) -> dict:
        """One /generate call; raises requests.HTTPError. sampling: SGLang's sampling parameters; `top` holds further
        top-level fields of the request (return_logprob, ...), `headers` those of the HTTP request."""
        headers = sampling.pop("headers", None)
        body: dict[str, Any] = {
            **sampling.pop("top", {}),
            "input_ids": list(input_ids),
            "sampling_params": sampling,
        }
        response = requests.post(
            self.url + "/generate", json=body, headers=headers, proxies=PROXIES, timeout=self.timeout
        )
        response.raise_for_status()
        return response.json()

    def stream(self, input_ids: Sequence[int], **sampling) -> Iterator[dict]:
        """The chunks of one streamed /generate call, each with all output so far; raises requests.HTTPError and
        StreamFailedError."""
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "sampling_params": sampling,
            "stream": True,
        }
        with requests.post(
            self.url + "/generate", json=body, stream=True, proxies=PROXIES, timeout=self.timeout
        ) as response:
            response.raise_for_status()
            for line in filter(None, response.iter_lines()):
                if line == b"data: [DONE]":
                    return
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise StreamFailedError(event["error"])
                yield event
        raise StreamFailedError("the stream ended without its last event")

    def generate_many(self, prompts: Sequence[Sequence[int]], concurrency: int, **sampling) -> list[dict]:
        """Answers in the order of the prompts, `concurrency` at a time."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda ids: self.generate(ids, **sampling), prompts))

    def answers(self, path: str) -> bool:
        """Whether GET answers 200."""
        try:
            return requests.get(f"{self.url}/{path}", proxies=PROXIES, timeout=5).status_code == 200
        except requests.RequestException:
            return False


class SglangServer(Endpoint):
    """A running server; `log` is its output. port: None for a free one."""

    child: type[Child] = Child

    def __init__(self, spec: ServerSpec, log: Path, port: int | None = None) -> None:
        self.spec, self.log = spec, log
        self.port = port or free_port()
        super().__init__(f"http://127.0.0.1:{self.port}")
        self.start()

    def start(self) -> None:
        """Starts the server; also again after `kill`."""
        environment = one_architecture() | self.spec.environment
        if DEVICE == "cpu":
            environment = CPU_ENVIRONMENT | environment
        self._child = self.child(
            self.spec.name, self.spec.command(self.port), environment, self.log, show=False
        )

    def wait_until_healthy(self) -> None:
        """Raises ChildDiedError with the log's tail if the server ends, TimeoutError if it is not healthy in time."""
        wait_until(lambda: self.answers("health"), [self._child], seconds=START_SECONDS)

    def server_info(self) -> dict:
        return requests.get(self.url + "/get_server_info", proxies=PROXIES, timeout=60).json()

    @property
    def pid(self) -> int:
        """Also its process group."""
        return self._child.pid

    def kill(self) -> None:
        """Like a failing machine: no process of the server gets to shut down."""
        self._child.kill()

    def stop(self) -> None:
        self._child.stop()


def exit_when_terminated() -> None:
    """SIGTERM ends this process by an exception, so that the servers it started are stopped on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))


class Startable(Protocol):
    """A server, or several that answer as one."""

    def wait_until_healthy(self) -> None: ...

    def stop(self) -> None: ...


S = TypeVar("S", bound=Startable)


@contextlib.contextmanager
def healthy(started: S) -> Iterator[S]:
    """What has been started, healthy, for the duration of the block."""
    try:
        started.wait_until_healthy()
        yield started
    finally:
        started.stop()


def running(spec: ServerSpec, folder: Path) -> AbstractContextManager[SglangServer]:
    """A healthy server for the duration of the block."""
    return healthy(SglangServer(spec, folder / f"{spec.name}.log"))
