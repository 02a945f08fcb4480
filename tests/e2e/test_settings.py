"""Settings of SGLang's beside SSSD: servers that have many of them at once give plain decoding's answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_patches.launch.servers import Endpoint, ServerSpec
from tests.support.servers import SglangServer, running
from tests.support.tiny_model import CHARACTERS, texts_of, write_spelling_model

GREEDY = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
REASONING = ("--reasoning-parser", "deepseek-r1")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Its tokenizer knows `</think>`."""
    return write_spelling_model(tmp_path_factory.mktemp("model"), CHARACTERS + "<>/")


@pytest.fixture(scope="module")
def prompts(model) -> list[list[int]]:
    return texts_of(model, 10, 60)


def spec(
    name: str, model: Path, flags: tuple[str, ...], algorithm: str | None = "SSSD", **sizes
) -> ServerSpec:
    flags += ("--context-length", "512", "--constrained-json-disable-any-whitespace")
    if algorithm is None:
        return ServerSpec(f"settings-{name}", model, dtype="float32", flags=flags, max_total_tokens=8192)
    flags += ("--specstore-length", "static", "--specstore-deadline-ms", "500")
    environment = {"SPECSTORE_ENDPOINT": "embedded"}
    sizes = {"max_total_tokens": 8192} | sizes
    return ServerSpec(
        f"settings-{name}", model, algorithm, dtype="float32", flags=flags, environment=environment, **sizes
    )


@pytest.fixture(scope="module")
def plain(model, logs) -> Iterator[SglangServer]:
    with running(spec("plain", model, REASONING, None), logs) as server:
        yield server


def test_thoughts_are_counted_as_they_are_said(model, plain, prompts, logs):
    """A step may accept more than an answer takes."""
    with running(spec("thinking", model, REASONING), logs) as server:
        for ids in prompts[:4]:
            said = thinking(plain, ids)[0]
            for wanted in (
                {},
                {"max_new_tokens": 21},
                {"stop_token_ids": said[15:16]},
                {"stop": ["q3", "e"]},
            ):
                theirs = thinking(plain, ids, **wanted)
                for _ in range(2):  # the live tier drafts what comes behind the end
                    assert thinking(server, ids, **wanted) == theirs
                assert theirs[1] == len(theirs[0]) > 0


def thinking(server: Endpoint, ids: list[int], **sampling) -> tuple[list[int], int]:
    """An answer's tokens, and how many of them the server counts as thoughts: the model never ends them."""
    answer = server.generate(ids, **GREEDY | sampling, top={"require_reasoning": True})
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"])
    return answer["output_ids"], answer["meta_info"]["reasoning_tokens"]
