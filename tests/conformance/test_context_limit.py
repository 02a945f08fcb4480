"""Requests that end at the context limit, from every distance: right tokens, and the server lives on.

CI runs the servers that are there; `--long` runs every width with every page size.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conformance.conftest import CONTEXT, SETUPS, Setup, assert_drafted, drafting_spec, start
from tests.conformance.test_features import output_ids
from tests.support.servers.forked import SglangServer
from tests.support.tiny_model import SPELLING_VOCABULARY
from tests.waiting import eventually

END = CONTEXT - 2  # SGLang keeps two tokens of the context free
NEAREST = 5  # and takes prompts up to six tokens below it


def _prompt(length: int) -> list[int]:
    """A phrase over and over, so that trees are wide and deep."""
    phrase = random.Random(5).choices(range(2, SPELLING_VOCABULARY), k=7)
    return (phrase * length)[:length]


def _answers(server: SglangServer, prompts: list[list[int]], lengths: list[int], batch: int) -> list[dict]:
    def answer(prompt: list[int], length: int) -> dict:
        return server.generate(prompt, temperature=0, ignore_eos=True, max_new_tokens=length)

    with ThreadPoolExecutor(batch) as pool:
        return list(pool.map(answer, prompts, lengths))


def _assert_right_from_every_distance(server: SglangServer, plain: SglangServer) -> None:
    distances = list(range(NEAREST, 2 * (server.spec.nodes + 1) + 8))
    # For EAGLE's heads SGLang keeps a step's rows free besides.
    end = END - (server.spec.nodes + 1) * str(server.spec.algorithm).startswith("EAGLE")
    prompts = [_prompt(end - distance) for distance in distances]
    expected = output_ids(_answers(plain, prompts, distances, 8))
    for batch in (4, 1):
        answers = _answers(server, prompts, distances, batch)
        assert output_ids(answers) == expected
        assert_drafted(server, answers[len(answers) // 2 :])
    eventually(lambda: server.answers("health_generate"), "it is dead", 60)


def test_every_distance_from_the_limit(server, plain):
    _assert_right_from_every_distance(server, plain)


@pytest.mark.long
@pytest.mark.parametrize(
    ("overlap", "width", "page_size"),
    [(True, 4, 1), (False, 4, 16), (False, 16, 1), (True, 16, 16), (True, 64, 1), (False, 64, 16)],
)
def test_every_width_and_page_size(
    method, spelling_model, draft_model, plain, method_environment, logs, overlap, width, page_size
):
    setup = Setup(overlap, True, width - 1, page_size, max_total_tokens=8192)
    assert setup not in SETUPS.values()
    with start(
        drafting_spec(method.name, spelling_model, draft_model, setup, "", method_environment), logs
    ) as server:
        _assert_right_from_every_distance(server, plain)
