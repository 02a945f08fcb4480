"""What tests see of a forked server is what they would see of one that SGLang's own command starts."""

import contextlib
import random
import re
from dataclasses import replace

import psutil
import pytest

from tests.support.servers import engine
from tests.support.servers.engine import ServerSpec
from tests.support.servers.forked import SglangServer, running
from tests.support.tiny_model import VOCABULARY
from tests.waiting import eventually

PROMPTS = [random.Random(i).choices(range(2, VOCABULARY), k=5 + 7 * i) for i in range(8)]
# Of /get_server_info: what two servers of one command differ in.
OWN = {"random_seed", "internal_states", "startup_time"}


@pytest.fixture(scope="module")
def pair(tiny_model, logs):
    flags = ("--enable-metrics", "--specstore-length", "static")
    spec = ServerSpec("by-fork", tiny_model, "SSSD", dtype="float32", flags=flags)
    with running(spec, logs) as forked, engine.running(replace(spec, name="by-command"), logs) as started:
        yield forked, started


def test_their_greedy_answers_are_equal(pair):
    def answers(server) -> list[list[int]]:
        wishes = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True, "frequency_penalty": 0.3}
        return [answer["output_ids"] for answer in server.generate_many(PROMPTS, 4, **wishes)]

    forked, started = map(answers, pair)
    assert forked == started
    assert all(len(answer) == 60 for answer in forked)


def test_their_settings_are_equal(pair):
    def settings(server) -> dict[str, str]:
        info = server.server_info().items()
        return {name: str(value).replace(str(server.port), "PORT") for name, value in info}

    forked, started = map(settings, pair)
    assert forked.keys() == started.keys()
    assert {name for name in forked if forked[name] != started[name]} <= OWN


def test_the_same_functions_are_hooked(pair):
    forked, started = (set(re.findall(r"Applied \d+ hook\(s\) to \S+", s.log.read_text())) for s in pair)
    assert forked == started != set()


def test_they_are_made_of_the_same_processes(pair):
    def names(server: SglangServer) -> set[str]:
        found = set()
        for process in psutil.Process(server.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.add(process.name())
        return found

    def equal() -> bool:
        forked, started = map(names, pair)
        return forked == started > {"sglang::scheduler"}

    eventually(equal, "they are not")  # a helper may be about to end
