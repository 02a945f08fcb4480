"""What is served, and on which core.

plain        no speculation
sssd         the datastore drafts, with the prior of recorded answers
saguaro      the draft model drafts beside the target, in a process with a core of its own
mirror       the same, after what an early exit of the target expects
double       as saguaro, and what it drafts is longer by what a datastore of its process knows
duo          the same as saguaro, with as many sequences as the draft model is unsure
specstore    the planner, with that draft model and that datastore
standalone   SGLang's own drafting with that model, before each step

All have one core for the target. Nothing that is answered is published to the datastore: every variant meets the same
prompts at every speed ratio, and must know no more of them the second time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.options import NEEDED, Parser
from benchmarks.traces import SHIPPED_PRIOR
from tests.support.servers.engine import ServerSpec, SglangServer

BESIDE = ("saguaro", "mirror", "double", "duo", "adaptive")  # have a draft process
VARIANTS = ("plain", "sssd", *BESIDE, "standalone")
WITH_DRAFT = (*BESIDE, "standalone")
ALGORITHMS = {name: name.upper() for name in ("sssd", *WITH_DRAFT)}
DRAFT_PROGRAM = "sglang_patches.draft_process"
TARGET_CORE, DRAFT_CORE = 0, 1
KV_TOKENS = 4096


def add_servers(parser: Parser, variants: Sequence[str], served: list[str], **defaults: object) -> None:
    """Declares the options of what is served and which part of an answer is timed. served: those of the variants that are by
    default."""
    add = parser.add
    add("--model", None, "folder of the target", **NEEDED)
    add("--draft", None, "folder of the draft model", **NEEDED)
    add("--early-exit", None, "file of the target's early exits, for mirror", type=Path)
    add("--prior", [SHIPPED_PRIOR], "recorded answers the datastore knows")
    add(
        "--variants",
        served,
        "the demo model's take 3 GiB each, in float32 4, with a draft process 4.5",
        choices=variants,
    )
    add("--batch", defaults["batch"], "requests at once")
    add("--nodes", defaults["nodes"], "K: drafted tokens per step, and after each guess")
    add("--rows", 24, "of a draft forward")
    add("--phrase", defaults["phrase"], "retrieved tokens of one, at most (DOUBLE)")
    add("--warm", defaults["warm"], "tokens of each answer before the timed part")
    add("--tokens", 24, "of the first answer that ends the timed part, after those")
    add("--plain-tokens", defaults["plain_tokens"], "the same for plain decoding, whose steps all yield one")
    add("--minutes", defaults["minutes"], "after which nothing is begun")


def check_variants(parser: Parser, given: argparse.Namespace, *needed: str) -> None:
    for name in needed:
        if name not in given.variants:
            parser.error(f"--variants: the others are compared with {name}")
    if "mirror" in given.variants and given.early_exit is None:
        parser.error("--early-exit: mirror needs the file")


@dataclass(frozen=True)
class Setup:
    """What all servers have in common. given: options of `add_servers`. dtype: of both models. length: whether all drafted tokens are verified (static) or as many as
    pay (adaptive). prior: directory of `specstore build`. tokens: of each KV cache, the target's and the draft model's."""

    given: argparse.Namespace
    dtype: str
    prior: Path
    length: str
    environment: dict[str, str]
    tokens: int = KV_TOKENS


def server_spec(variant: str, setup: Setup) -> ServerSpec:
    given, flags = setup.given, {}
    if variant in ALGORITHMS and variant != "standalone":
        flags = {"prior": setup.prior, "publish": "off", "length": setup.length}
    if variant in BESIDE:
        flags |= {"draft-rows": given.rows, "draft-lookahead": given.nodes, "draft-tokens": setup.tokens}
        flags |= {"draft-phrase": given.phrase}
    if variant == "mirror":
        flags |= {"early-exit": given.early_exit}
    return ServerSpec(
        variant,
        given.model,
        ALGORITHMS.get(variant),
        setup.dtype,
        given.nodes,
        given.draft if variant in WITH_DRAFT else None,
        flags=(
            *(w for name, of in flags.items() for w in (f"--specstore-{name}", str(of))),
            "--enable-metrics",
        ),
        environment={**setup.environment, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        max_running_requests=max(given.batch),
        max_total_tokens=setup.tokens,
    )


def pin(server: SglangServer) -> None:
    """The draft process to one core, all else of the server to the other."""
    for process in [(root := psutil.Process(server.pid)), *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            draft = any(DRAFT_PROGRAM in word for word in process.cmdline())
            for thread in process.threads():
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.sched_setaffinity(thread.id, {DRAFT_CORE if draft else TARGET_CORE})


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
        for server in servers.values():
            pin(server)
        os.sched_setaffinity(0, {DRAFT_CORE})
        yield servers


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The same names, begun with another each turn: no variant is always the first."""
    at = turn % len(names)
    return [*names[at:], *names[:at]]
