"""The draft process is killed again and again under load: no wrong token, no request that hangs or fails, and drafts come back.

It reports how long a step took with kills, without them, and in plain decoding. docs/draft-model.md sums it up.
"""

from __future__ import annotations

import time

import numpy as np
import psutil
import pytest

from tests.support.load import GREEDY, REQUESTS, Load, drafts_of, is_up, pid_of_draft
from tests.support.servers.engine import ServerSpec
from tests.support.servers.forked import SglangServer, running
from tests.support.servers.metrics import metric
from tests.support.tiny_drafts import spelling_draft
from tests.support.tiny_model import texts_of, write_spelling_model
from tests.waiting import eventually

PROMPTS = 16
FLAGS = ("--enable-metrics", "--context-length", "1024")
# The datastore would learn the answers, which come again and again. The length is fixed, or a busy machine may verify no drafts.
DRAFTING = ("--specstore-endpoint", "embedded", "--specstore-publish", "off", "--specstore-length", "static")
NODES = 3  # of a tree: a step costs little more than a plain one
CALM_SECONDS = 30.0  # of load without a kill
AT_ONCE = 3  # kills as soon as the process is ready; the delay before the next start doubles
HEALTHY_SECONDS = 11.0  # that it lives before the other kills: the delay is the first again
PATIENCE = 300.0  # with a start on a busy machine

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_spelling_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def draft(model, tmp_path_factory):
    return spelling_draft(model, tmp_path_factory.mktemp("draft"), 0.9)


@pytest.fixture(scope="module")
def plain_load(model, logs) -> Load:
    """Of plain decoding, whose server is gone: it would take time from the others."""
    prompts = [tuple(text) for text in texts_of(model, PROMPTS, 60)]
    with running(ServerSpec("plain", model, dtype="float32", flags=FLAGS), logs) as server:
        answers = server.generate_many(prompts, REQUESTS, **GREEDY)
        expected = {prompt: answer["output_ids"] for prompt, answer in zip(prompts, answers, strict=True)}
        with Load(server, expected) as load:
            watch(server, CALM_SECONDS)
    return load


@pytest.mark.parametrize(("fallback", "kills"), [("datastore", 20), ("draft", 5)])
def test_kills_under_load(fallback, kills, model, draft, plain_load, logs, capsys):
    flags = (*FLAGS, *DRAFTING, "--specstore-fallback", fallback)
    name = f"kills-{fallback}"
    spec = ServerSpec(name, model, "SAGUARO", dtype="float32", nodes=NODES, draft=draft, flags=flags)
    with running(spec, logs) as server:
        with Load(server, plain_load.expected) as calm:
            watch(server, CALM_SECONDS)
        with Load(server, plain_load.expected) as load:
            moments = kill(server, kills)
            eventually(lambda: restarts(server) >= kills and is_up(server), seconds=PATIENCE)
            drafts = drafts_of(server)
            eventually(lambda: drafts_of(server) > drafts, "drafts did not come back", PATIENCE)
        assert restarts(server) == kills, "it ended on its own as well"
    with capsys.disabled():
        print(f"\nfallback {fallback}, {REQUESTS} requests: seconds of a step as a client sees it")
        for name, of in (("plain", plain_load), ("without kills", calm), (f"{kills} kills", load)):
            print(f"  {name:14}{described(of.seconds())}; {of.answers} answers")
        print(f"  around a kill {described(np.array(load.longest_around(moments)))}")
    assert plain_load.faults == calm.faults == load.faults == []


def kill(server: SglangServer, times: int) -> list[float]:
    """When each kill was, by monotonic."""
    moments, last = [], 0
    for turn in range(times):
        eventually(
            lambda last=last: pid_of_draft(server) not in (0, last) and is_up(server), seconds=PATIENCE
        )
        if turn >= AT_ONCE:
            drafts = drafts_of(server)
            watch(server, HEALTHY_SECONDS)
            eventually(lambda drafts=drafts: drafts_of(server) > drafts, "drafts did not come back", PATIENCE)
        last = pid_of_draft(server)
        moments.append(time.monotonic())
        psutil.Process(last).kill()
    return moments


def watch(server: SglangServer, seconds: float) -> None:
    """Reads its metrics from time to time, as `kill` does, so that all steps bear the same."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        is_up(server)
        time.sleep(0.5)


def restarts(server: SglangServer) -> float:
    return metric(server.url, "specstore_draft_restarts_total")


def described(seconds: np.ndarray) -> str:
    p50, p99 = np.percentile(seconds, [50, 99])
    return f"{len(seconds):7} steps, p50 {p50:.4f}, p99 {p99:.4f}, longest {seconds.max():.4f}"
