"""What is served, and on which core.

plain        no speculation
plain_two    the same with both cores, which is what an operator without a draft model would give it
sssd         the datastore drafts, with the prior of recorded answers
saguaro      the draft model drafts beside the target, in a process with a core of its own
mirror       the same, after what an early exit of the target expects
double       as saguaro, and what it drafts is longer by what a datastore of its process knows
duo          the same as saguaro, with as many sequences as the draft model is unsure
specstore    the planner, with that draft model and that datastore
standalone   SGLang's own drafting with that model, before each step

All but plain_two have one core for the target. Nothing that is answered is published to the datastore: every variant meets the same
prompts at every speed ratio, and must know no more of them the second time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.servers.engine import ServerSpec, SglangServer

BESIDE = ("saguaro", "mirror", "double", "duo", "specstore")  # have a draft process
VARIANTS = ("plain", "plain_two", "sssd", *BESIDE, "standalone")
WITH_DRAFT = (*BESIDE, "standalone")
ALGORITHMS = {name: name.upper() for name in ("sssd", *WITH_DRAFT)}
DRAFT_PROGRAM = "sglang_patches.draft_process"
TARGET_CORE, DRAFT_CORE = 0, 1
KV_TOKENS = 4096


@dataclass(frozen=True)
class Setup:
    """dtype: of both models. nodes: drafted tokens a step, and of the draft process after each guess. rows: of a draft forward.
    phrase: tokens of a datastore that it checks in one (DOUBLE). length: whether all are verified (static) or as many as pay
    (adaptive). prior: directory of `specstore build`. early_exit: file of the target's (MIRROR), None without. tokens: of each KV
    cache, the target's and the draft model's."""

    model: Path
    draft: Path
    dtype: str
    prior: Path
    nodes: int
    rows: int
    phrase: int
    length: str
    batch: int
    environment: dict[str, str]
    early_exit: Path | None = None
    tokens: int = KV_TOKENS


def server_spec(variant: str, setup: Setup) -> ServerSpec:
    ours = (
        *("--specstore-prior", str(setup.prior), "--specstore-publish", "off"),
        *("--specstore-length", setup.length),
    )
    process = (
        *("--specstore-draft-rows", str(setup.rows), "--specstore-draft-lookahead", str(setup.nodes)),
        *("--specstore-draft-tokens", str(setup.tokens), "--specstore-draft-phrase", str(setup.phrase)),
    )
    flags = {"sssd": ours} | dict.fromkeys(BESIDE, (*ours, *process))
    flags["mirror"] += ("--specstore-early-exit", str(setup.early_exit))
    threads = "2" if variant == "plain_two" else "1"
    return ServerSpec(
        variant,
        setup.model,
        ALGORITHMS.get(variant),
        setup.dtype,
        setup.nodes,
        setup.draft if variant in WITH_DRAFT else None,
        flags=(*flags.get(variant, ()), "--enable-metrics"),
        environment={**setup.environment, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"},
        max_running_requests=setup.batch,
        max_total_tokens=setup.tokens,
    )


def pin(variant: str, server: SglangServer) -> None:
    """The draft process to one core, all else of the server to the other; a server for two cores to both."""
    for process in [(root := psutil.Process(server.pid)), *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            draft = any(DRAFT_PROGRAM in word for word in process.cmdline())
            cores = (
                {TARGET_CORE, DRAFT_CORE}
                if variant == "plain_two"
                else {DRAFT_CORE if draft else TARGET_CORE}
            )
            for thread in process.threads():
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.sched_setaffinity(thread.id, cores)


def check_room(server: SglangServer, tokens: int) -> None:
    """Raises RuntimeError where SGLang found less memory than the KV cache needs and made it smaller: requests would wait for others."""
    found = server.server_info()["max_total_num_tokens"]
    if found < tokens:
        raise RuntimeError(
            f"{server.spec.name}: there was memory for {found} of {tokens} KV tokens: fewer --variants"
        )


@contextlib.contextmanager
def all_running(variants: Sequence[str], setup: Setup, folder: Path) -> Iterator[dict[str, SglangServer]]:
    """The servers, each on its core once all are up; this process on the draft model's. One starts after the other: a server takes
    what another one loads meanwhile for its own weights, and finds no room for its KV cache."""
    with contextlib.ExitStack() as stack:
        servers = {}
        for variant in variants:
            servers[variant] = SglangServer(server_spec(variant, setup), folder / f"{variant}.log")
            stack.callback(servers[variant].stop)
            servers[variant].wait_until_healthy()
            check_room(servers[variant], setup.tokens)
            say(f"{variant} is up")
        for variant, server in servers.items():
            pin(variant, server)
        os.sched_setaffinity(0, {DRAFT_CORE})
        yield servers


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The same names, begun with another each turn: no variant is always the first."""
    at = turn % len(names)
    return [*names[at:], *names[:at]]
