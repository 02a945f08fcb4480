"""A server of two tensor-parallel ranks (`--tp-size 2`) on a CPU: both commit the same tokens, and greedy ones are those of plain decoding
by two ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from sglang_patches.methods.registry import ALGORITHMS, HEADS, METHODS
from tests.support.servers.engine import ServerSpec
from tests.support.servers.forked import SglangServer, draft_processes, running
from tests.support.servers.metrics import metric
from tests.support.system import require
from tests.support.tiny_drafts import spelling_draft
from tests.support.tiny_exits import train_tiny_exits
from tests.support.tiny_head import train_tiny_head
from tests.support.tiny_model import texts_of, write_spelling_model
from tests.waiting import eventually

RANKS = 2
PLUGIN = Path(__file__).parent / "ranks_plugin"
PATH = os.pathsep.join(filter(None, [str(PLUGIN), os.environ.get("PYTHONPATH", "")]))
# SGLang wants a NUMA node for each rank, or to be told which cores a rank has.
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * RANKS)}
FLAGS = ("--tp", str(RANKS), "--context-length", "512", "--enable-metrics")
TOKENS = 48
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}
# Algorithm, overlap scheduling. SGLang has none for heads on a CPU.
SHORT = {("SSSD", True), ("ADAPTIVE", False), ("EAGLE3", False)}
CASES = [
    pytest.param(
        (name, overlap),
        id=f"{name}-{'overlap' if overlap else 'in-turn'}",
        marks=() if (name, overlap) in SHORT else pytest.mark.long,
    )
    for name, overlap in [
        *((method, overlap) for method in METHODS for overlap in (True, False)),
        *((head, False) for head in ("EAGLE3", "STANDALONE")),
    ]
]


class Served(NamedTuple):
    """folder: with what each rank wrote."""

    method: str
    server: SglangServer
    folder: Path

    def of_ranks(self, rids: set[str]) -> list[dict[str, list[int]]]:
        """Of each rank the tokens of these finished requests."""
        files = [self.folder / f"rank-{rank}" for rank in range(RANKS)]

        def read() -> list[dict[str, list[int]]]:
            lines = (file.read_text().splitlines() if file.exists() else [] for file in files)
            return [{rid: tokens for rid, tokens in map(json.loads, of) if rid in rids} for of in lines]

        eventually(lambda: all(rids == set(tokens) for tokens in read()), "a rank has not finished")
        return read()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_spelling_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def draft(model, tmp_path_factory) -> Path:
    return spelling_draft(model, tmp_path_factory.mktemp("draft"), 0.9)


@pytest.fixture(scope="module")
def prompts(model) -> list[list[int]]:
    return texts_of(model, 6, 60)


def spec(name: str, model: Path, environment: dict[str, str], **settings) -> ServerSpec:
    return ServerSpec(
        f"ranks-{name}",
        model,
        dtype="float32",
        flags=FLAGS,
        environment=CORES | environment,
        max_total_tokens=8192,
        **settings,
    )


@pytest.fixture(scope="module")
def expected(model, prompts, logs) -> list[list[int]]:
    """Greedy answers of plain decoding by as many ranks. SGLang compiles the look-up in a rank's part of the vocabulary."""
    require("g++")
    with running(spec("plain", model, {}), logs) as server:
        return answers(server, prompts)


def answers(server: SglangServer, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy ones, all at a time."""
    return [answer["output_ids"] for answer in server.generate_many(prompts, len(prompts), **GREEDY)]


@pytest.fixture(scope="module", params=CASES)
def served(request, expected, model, draft, logs, tmp_path_factory) -> Iterator[Served]:
    """expected: its server is over by now."""
    (name, overlap), folder = request.param, tmp_path_factory.mktemp("ranks")
    method, environment = ALGORITHMS[name], {"PYTHONPATH": PATH, "SPECSTORE_RANKS_FOLDER": str(folder)}
    if method.early_exit:
        environment["SPECSTORE_EARLY_EXIT"] = str(train_tiny_exits(model, folder / "exits.safetensors"))
    settings = {"algorithm": name, "overlap": overlap, "beside_head": name in HEADS}
    settings["draft"] = draft if method.draft_process or name == "STANDALONE" else None
    if name == "EAGLE3":
        settings["draft"] = train_tiny_head(name, model, tmp_path_factory.mktemp("head"))
    with running(spec(f"{name}-{overlap}", model, environment, **settings), logs) as server:
        yield Served(name, server, folder)


def test_greedy_answers_are_plain_decodings(served, prompts, expected):
    assert answers(served.server, prompts) == expected
    assert answers(served.server, prompts) == expected  # from the datastore, which has them by now
    assert metric(served.server.url, "specstore_accepted_nodes_total") > 0


def test_all_ranks_commit_the_same_sampled_tokens(served, prompts):
    """The ranks' noise is drawn by each. What follows a step shows whether they went on from the same tokens."""
    said = served.server.generate_many(prompts, len(prompts), **SAMPLED)
    committed = {answer["meta_info"]["id"]: answer["output_ids"] for answer in said}
    first, second = served.of_ranks(committed.keys())
    assert first == second
    assert {
        rid: tokens[:TOKENS] for rid, tokens in first.items()
    } == committed  # the last step may pass the end


def test_one_rank_drafts_and_counts(served, prompts):
    """Overlap scheduling runs a step more than a request needs."""
    drafting = ALGORITHMS[served.method].draft_process
    assert len(draft_processes(served.server)) == metric(served.server.url, "specstore_draft_up") == drafting
    log = served.server.log.read_text()
    assert log.count(f"specstore: {served.method}, ") == 1
    before = metric(served.server.url, "specstore_decode_step_seconds_count")
    answer = served.server.generate(prompts[0], **GREEDY)
    counted = metric(served.server.url, "specstore_decode_step_seconds_count") - before
    assert 0 < counted <= answer["meta_info"]["specstore"]["steps"] + 2
