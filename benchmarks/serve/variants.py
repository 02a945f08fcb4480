"""What is served. Variants:

plain              no speculation
ngram              SGLang's own n-gram drafting, which learns from what it answers
ngram_corpus       the same with the prior as its external corpus, half of the nodes for it
sssd               embedded datastore with the prior; chooses the rows of each step
sssd_cold          the same as sssd with an empty datastore
sssd_grpc          the same as sssd with the datastore as a service
sssd_crowded       the same as sssd with four unrelated corpora beside the prior
sssd_by_request    the same as sssd, but each request of a step has its own rows (on a CPU)
sssd_static        the same as sssd_cold, but always verifies the whole node budget: NGRAM's equal in rows and in what it knows
saguaro            the same as sssd with a draft model beside the target (--draft)
standalone         SGLang's own drafting with that draft model, a chain before each step
standalone_beside  the same, and the embedded datastore with the prior beside it
eagle3             SGLang's own drafting with an EAGLE-3 head (--head), a chain before each step
eagle3_beside      the same, and the embedded datastore with the prior beside it
control            drafts that never match, all of them verified: what verification costs
control_adaptive   drafts that never match, rows chosen for each step: what the plugin costs where it cannot help
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.by_request import rows_by_request
from benchmarks.services import add_never_matching, service
from benchmarks.sources import SUFFIXES, source_documents
from benchmarks.traces import recorded_rows
from sglang_patches.launch.processes import Child, free_port, wait_until
from sglang_patches.launch.serve import SPECSTORE, datastore_command, datastore_healthy
from tests.support.servers.engine import HEAD_STEPS, ServerSpec

VARIANTS = (
    "plain", "ngram", "ngram_corpus", "sssd", "sssd_cold", "sssd_grpc", "sssd_crowded", "sssd_by_request",
    "sssd_static", "saguaro", "standalone", "standalone_beside", "eagle3", "eagle3_beside", "control", "control_adaptive",
)  # fmt: skip
ALGORITHMS = {
    "plain": None, "ngram": "NGRAM", "ngram_corpus": "NGRAM", "saguaro": "SAGUARO", "standalone": "STANDALONE",
    "standalone_beside": "STANDALONE", "eagle3": "EAGLE3", "eagle3_beside": "EAGLE3",
}  # fmt: skip
WITH_DRAFT = ("saguaro", "standalone", "standalone_beside")
WITH_HEAD = ("eagle3", "eagle3_beside")
ALONE = ("standalone", "eagle3")  # with HEAD_STEPS tokens per step, as beside retrieval
BESIDE = ("standalone_beside", "eagle3_beside")
CONTROLS = ("control", "control_adaptive")
OURS = (
    "sssd",
    "sssd_cold",
    "sssd_grpc",
    "sssd_crowded",
    "sssd_by_request",
    "sssd_static",
)  # those that draft from a datastore
DISTRACTOR_TOKENS = 500_000  # of each unrelated corpus


@dataclass(frozen=True)
class Knowledge:
    """What variants know before the first request. prior, crowded: directories of `specstore build`. corpus: NGRAM's file."""

    prior: Path
    crowded: Path
    corpus: Path


@dataclass(frozen=True)
class Settings:
    """nodes: drafted tokens a tree; the root is one row more. draft: model of WITH_DRAFT. head: weights of WITH_HEAD."""

    model: Path
    draft: Path | None
    head: Path | None
    dtype: str
    nodes: int
    batches: tuple[int, ...]


def prepare(variants: Sequence[str], answers: Sequence[Path], tokenizer: Path, folder: Path) -> Knowledge:
    """Builds from recorded answers what these variants need."""
    knowledge = Knowledge(folder / "prior", folder / "crowded", folder / "corpus.jsonl")
    rows = [row for file in answers for row in recorded_rows(file)]
    own = folder / "answers.jsonl"
    own.write_text("".join(json.dumps({"tokens": row["tokens"]}) + "\n" for row in rows))
    knowledge.corpus.write_text("".join(json.dumps(row["answer"]) + "\n" for row in rows))
    _build(tokenizer, knowledge.prior, [own])
    if "sssd_crowded" in variants:
        _build(tokenizer, knowledge.crowded, [own, *_distractors(tokenizer, folder)])
    return knowledge


def _distractors(tokenizer: Path, folder: Path) -> list[Path]:
    loaded, files = Tokenizer.from_file(str(tokenizer)), []
    for kind in SUFFIXES:
        files.append(folder / f"{kind}.jsonl")
        documents: list[np.ndarray] = source_documents(loaded, DISTRACTOR_TOKENS, kind=kind)
        files[-1].write_text("".join(json.dumps({"tokens": row.tolist()}) + "\n" for row in documents))
    return files


def _build(tokenizer: Path, out: Path, files: Sequence[Path]) -> None:
    command = [*SPECSTORE, "build", "--tokenizer", str(tokenizer), "--field", "tokens", "--out", str(out)]
    subprocess.run([*command, *map(str, files)], check=True, stdout=subprocess.DEVNULL)


def server_spec(variant: str, settings: Settings, knowledge: Knowledge, ports: dict[str, int]) -> ServerSpec:
    """The server of one variant. ports: of the services that run."""

    def endpoint(service: str) -> tuple[str, str]:
        return "--specstore-endpoint", f"127.0.0.1:{ports[service]}"

    prior = ("--specstore-prior", str(knowledge.prior))
    half = str(settings.nodes // 2)
    corpus = ("--speculative-ngram-external-corpus-path", str(knowledge.corpus))
    flags: dict[str, tuple[str, ...]] = {
        "ngram_corpus": (*corpus, "--speculative-ngram-external-sam-budget", half),
        "sssd": prior,
        "sssd_by_request": prior,
        "saguaro": prior,
        **dict.fromkeys(BESIDE, prior),
        "sssd_static": ("--specstore-length", "static"),
        "sssd_crowded": ("--specstore-prior", str(knowledge.crowded)),
    }
    if variant == "sssd_grpc":
        flags[variant] = endpoint("datastore")
    if variant in CONTROLS:
        static = ("--specstore-length", "static") if variant == "control" else ()
        flags[variant] = (*endpoint("control"), *static)
    drafts = {name: settings.draft for name in WITH_DRAFT} | {name: settings.head for name in WITH_HEAD}
    return ServerSpec(
        variant,
        settings.model,
        ALGORITHMS.get(variant, "SSSD"),
        settings.dtype,
        HEAD_STEPS if variant in ALONE else settings.nodes,
        drafts.get(variant),
        flags=(*flags.get(variant, ()), "--enable-metrics"),
        max_running_requests=max(settings.batches),
        beside_head=variant in BESIDE,
        environment=rows_by_request() if variant == "sssd_by_request" else {},
    )


@contextlib.contextmanager
def services(
    variants: Sequence[str], knowledge: Knowledge, unused_token: int, folder: Path
) -> Iterator[dict[str, int]]:
    """The gRPC services that the variants draft from, by name: the port of each, and of the datastore's metrics."""
    ports: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        if "sssd_grpc" in variants:
            port, ports["metrics"] = free_port(), free_port()
            ports["datastore"] = port
            words = [*datastore_command(knowledge.prior, port), "--metrics-port", str(ports["metrics"])]
            child = Child("datastore", words, {}, folder / "datastore.log", show=False)
            stack.callback(child.stop)
            wait_until(lambda: datastore_healthy(port), [child])
        if set(CONTROLS) & set(variants):
            ports["control"] = stack.enter_context(service(partial(add_never_matching, unused_token)))
        yield ports
