"""`python -m tests.soak.engine`: an engine under load while its draft process and its datastore are killed, stopped and ended.

Every answer must be plain decoding's, no request may fail or hang, drafts must come back, sessions must end, and memory must not grow.
The model has a few thousand weights; server, draft process and datastore are real.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from tests.soak.service import ServiceProcess
from tests.support.load import GREEDY, REQUESTS, SILENCE, Load, drafts_of, is_up, pid_of_draft
from tests.support.servers.engine import Endpoint, ServerSpec
from tests.support.servers.forked import SglangServer, running
from tests.support.servers.metrics import metric
from tests.support.tiny_drafts import spelling_draft
from tests.support.tiny_model import texts_of, write_spelling_model
from tests.waiting import eventually

METHODS = ("SAGUARO", "DOUBLE", "DUO", "ADAPTIVE")
AGREEMENT = 0.9
PROMPTS, PROMPT_TOKENS = 40, 60  # a prompt begins with each token of the model, which has 46
LEFT = 2  # clients that go away in the middle of an answer
BETWEEN = (2.0, 12.0)  # seconds from one disturbance to the next
PAUSE, DOWN = (0.05, 5.0), (0.0, 3.0)
PATIENCE = 600.0
GROWTH = 128 << 20  # resident bytes of the scheduler after its first quarter: buffers of the allocator
FLAGS = ("--enable-metrics", "--context-length", "1024")


class Leaving:
    """Clients that close the connection after some pieces of an answer, until the end."""

    def __init__(self, server: SglangServer, prompts: Sequence[tuple[int, ...]], rng: random.Random) -> None:
        self.left = 0
        self._over = threading.Event()
        self._server, self._prompts = Endpoint(server.url, SILENCE), prompts
        seeds = [rng.random() for _ in range(LEFT)]
        self._clients = [threading.Thread(target=self._ask, args=(seed,), daemon=True) for seed in seeds]

    def __enter__(self) -> Leaving:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for client in self._clients:
            client.join(SILENCE)

    def _ask(self, seed: float) -> None:
        rng = random.Random(seed)
        while not self._over.is_set():
            pieces = self._server.stream(rng.choice(self._prompts), **GREEDY)
            for _ in itertools.islice(pieces, rng.randrange(1, 60)):
                if self._over.is_set():
                    break
            pieces.close()
            self.left += 1


class Breaker:
    """Breaks one thing at a time. done: how often each was."""

    def __init__(self, server: SglangServer, service: ServiceProcess, rng: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self._server, self._service, self._rng = server, service, rng
        self._ways: dict[str, Callable[[], None]] = {
            "draft killed": lambda: self._signal_draft(signal.SIGKILL),
            "draft stopped for a while": self._pause_draft,
            "datastore killed": lambda: self._restart(self._service.kill),
            "datastore stopped for a while": lambda: self._service.pause_for(rng.uniform(*PAUSE)),
            "datastore ended": lambda: self._restart(self._service.terminate),
        }

    def once(self) -> None:
        """A draft process that is not up again yet is left alone."""
        up = is_up(self._server)
        name = self._rng.choice([way for way in self._ways if up or not way.startswith("draft")])
        self._ways[name]()
        self.done[name] += 1
        print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)

    def _signal_draft(self, number: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # it was killed for not answering just now
            psutil.Process(pid_of_draft(self._server)).send_signal(number)

    def _pause_draft(self) -> None:
        self._signal_draft(signal.SIGSTOP)
        time.sleep(self._rng.uniform(*PAUSE))
        self._signal_draft(signal.SIGCONT)

    def _restart(self, end: Callable[[], None]) -> None:
        end()
        time.sleep(self._rng.uniform(*DOWN))
        self._service.start()


def soak(algorithm: str, minutes: float, seed: int, folder: Path) -> dict:
    """One run; its summary, with everything found wrong under `violations`."""
    rng = random.Random(seed)
    for name in ("model", "draft"):
        (folder / name).mkdir()
    model = write_spelling_model(folder / "model")
    draft = spelling_draft(model, folder / "draft", AGREEMENT)
    expected = plain_answers(model, folder)
    token = secrets.token_hex(16)
    vocabulary = 1 + max(token for text in (*expected, *expected.values()) for token in text)
    service = ServiceProcess(folder, token, "--vocab-size", max(vocabulary, 256), "--grace", 2.0)
    memory: list[int] = []
    with service, engine(algorithm, model, draft, service.endpoint, folder) as server:
        breaker = Breaker(server, service, rng)
        with Load(server, expected) as load, Leaving(server, list(expected), rng) as leaving:
            until = time.monotonic() + 60 * minutes
            while time.monotonic() < until and not load.faults:
                time.sleep(rng.uniform(*BETWEEN))
                breaker.once()
                memory.append(scheduler_bytes(server))
            violations = [*came_back(server)]
        violations += [*load.faults, *at_rest(server, service, memory)]
        lookups = int(metric(server.url, "specstore_speculation_lookups_total"))
    violations += [f"datastore's log: {traceback}" for traceback in service.tracebacks()]
    return {
        "algorithm": algorithm, "seed": seed, "minutes": minutes, "answers": load.answers, "left": leaving.left, "lookups": lookups,
        "broken": dict(sorted(breaker.done.items())), "longest_step": max(load.seconds(), default=0.0),
        "memory_mib": [size >> 20 for size in (memory[len(memory) // 4], memory[-1])], "violations": violations,
    }  # fmt: skip


def plain_answers(model: Path, folder: Path) -> dict[tuple[int, ...], list[int]]:
    prompts = [tuple(text) for text in texts_of(model, PROMPTS, PROMPT_TOKENS)]
    with running(ServerSpec("plain", model, dtype="float32", flags=FLAGS), folder) as server:
        answers = server.generate_many(prompts, REQUESTS, **GREEDY)
    return {prompt: answer["output_ids"] for prompt, answer in zip(prompts, answers, strict=True)}


@contextlib.contextmanager
def engine(algorithm: str, model: Path, draft: Path, endpoint: str, folder: Path) -> Iterator[SglangServer]:
    flags = (*FLAGS, "--specstore-endpoint", endpoint)
    spec = ServerSpec("engine", model, algorithm, dtype="float32", nodes=7, draft=draft, flags=flags)
    with running(spec, folder) as server:
        yield server


def scheduler_bytes(server: SglangServer) -> int:
    """Resident, of the largest process of the server that is no draft process."""
    draft = pid_of_draft(server)
    sizes = [0]
    for process in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid != draft:
                sizes.append(process.memory_info().rss)
    return max(sizes)


def came_back(server: SglangServer) -> Iterator[str]:
    """While the load goes on."""
    try:
        eventually(lambda: is_up(server), seconds=PATIENCE)
        drafts = drafts_of(server)
        eventually(lambda: drafts_of(server) > drafts, seconds=PATIENCE)
    except AssertionError:
        yield "the draft process's drafts did not come back"


def at_rest(server: SglangServer, service: ServiceProcess, memory: Sequence[int]) -> Iterator[str]:
    """After the last request."""
    try:
        eventually(lambda: service.sessions() == 0, seconds=60)
    except AssertionError:
        yield f"{service.sessions()} sessions are left in the datastore"
    try:
        eventually(lambda: metric(server.url, "sglang:num_used_tokens") == 0, seconds=60)
    except AssertionError:
        yield f"{metric(server.url, 'sglang:num_used_tokens'):.0f} KV slots are in use without a request"
    growth = memory[-1] - memory[len(memory) // 4]
    if growth > GROWTH:
        yield f"the scheduler has grown by {growth >> 20} MiB"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.engine", description="An engine under load and kills."
    )
    parser.add_argument("--algorithm", choices=METHODS, default="ADAPTIVE")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="of disturbances; a new one if left out")
    parser.add_argument("--keep", type=Path, help="folder for data and logs, which must be new; kept")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if anything was wrong."""
    given = parse(argv)
    seed = given.seed if given.seed is not None else secrets.randbelow(1 << 31)
    folder = given.keep or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=not given.keep)
    try:
        summary = soak(given.algorithm, given.minutes, seed, folder)
    finally:
        if not given.keep:
            shutil.rmtree(folder)
    print(json.dumps(summary))
    return 1 if summary["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
