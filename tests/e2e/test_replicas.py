"""Replicas of one server (`--dp-size`): a draft process each, and plain decoding's answers from all."""

from __future__ import annotations

import pytest

from tests.support.load import GREEDY, drafts_of
from tests.support.servers.engine import ServerSpec
from tests.support.servers.forked import draft_processes, running
from tests.support.tiny_drafts import spelling_draft
from tests.support.tiny_model import texts_of, write_spelling_model
from tests.waiting import eventually

REPLICAS, REQUESTS = 2, 8
FLAGS = ("--enable-metrics", "--context-length", "1024")
# SGLang wants a NUMA node for each replica, or to be told which cores one has.
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * REPLICAS)}


@pytest.mark.long
def test_every_replica_has_a_draft_process(tmp_path, logs):
    for name in ("model", "draft"):
        (tmp_path / name).mkdir()
    model = write_spelling_model(tmp_path / "model")
    draft = spelling_draft(model, tmp_path / "draft", 0.9)
    prompts = texts_of(model, 2 * REQUESTS, 60)
    with running(ServerSpec("replicas-plain", model, dtype="float32", flags=FLAGS), logs) as server:
        expected = [answer["output_ids"] for answer in server.generate_many(prompts, REQUESTS, **GREEDY)]
    flags = (*FLAGS, "--dp-size", str(REPLICAS), "--load-balance-method", "round_robin")
    spec = ServerSpec(
        "replicas", model, "ADAPTIVE", dtype="float32", nodes=3, draft=draft, flags=flags, environment=CORES
    )
    with running(spec, logs) as server:
        processes = draft_processes(server)
        assert len(processes) == REPLICAS
        assert [a["output_ids"] for a in server.generate_many(prompts, REQUESTS, **GREEDY)] == expected
        processes[0].kill()
        assert [a["output_ids"] for a in server.generate_many(prompts, REQUESTS, **GREEDY)] == expected
        eventually(lambda: len(draft_processes(server)) == REPLICAS, seconds=300)
        eventually(lambda: drafts_of(server) > 0, "none of its drafts was verified")
