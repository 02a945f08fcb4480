"""A model with MTP layers (NEXTN) and retrieval beside them: both are accepted, and answers are plain decoding's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.engine import ServerSpec
from tests.support.servers.forked import SglangServer, running
from tests.support.tiny_model import SPELLING_VOCABULARY
from tests.support.tiny_mtp import write_mtp_model

pytest.importorskip("sglang")

ANSWER, PROMPTS = 64, 6
FLAGS = ("--context-length", "512", "--specstore-length", "static")
WANTED = {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_mtp_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokens = random.Random(1)
    return [[tokens.randrange(2, SPELLING_VOCABULARY) for _ in range(40)] for _ in range(PROMPTS)]


@pytest.fixture(scope="module")
def expected(target, prompts) -> list[list[int]]:
    """Greedy answers under transformers."""
    import torch
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(target)
    said = model.generate(
        torch.tensor(prompts), do_sample=False, min_new_tokens=ANSWER, max_new_tokens=ANSWER
    )
    return said[:, len(prompts[0]) :].tolist()


@pytest.fixture(scope="module")
def server(target, logs) -> Iterator[SglangServer]:
    spec = ServerSpec(
        "nextn",
        target,
        "NEXTN",
        dtype="float32",
        draft=target,
        flags=FLAGS,
        environment={"SPECSTORE_ENDPOINT": "embedded"},
        max_total_tokens=8192,
        beside_head=True,
    )
    with running(spec, logs) as server:
        yield server


def test_answers_are_plain_decodings_and_both_are_accepted(server, prompts, expected):
    accepted: dict[str, int] = {}
    for _ in range(2):  # the second time the datastore knows the answers
        answers = server.generate_many(prompts, PROMPTS, **WANTED)
        assert [answer["output_ids"] for answer in answers] == expected
        for answer in answers:
            for source, count in answer["meta_info"]["specstore"]["accepted"].items():
                accepted[source] = accepted.get(source, 0) + count
    assert accepted.pop("head") > 0 < sum(accepted.values())
