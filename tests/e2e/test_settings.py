"""Settings of SGLang's beside SSSD: servers that have many of them at once give plain decoding's answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.servers.engine import Endpoint, ServerSpec
from tests.support.servers.forked import SglangServer, running
from tests.support.tiny_model import CHARACTERS, texts_of, write_spelling_model

GREEDY = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
EXPRESSION = "(ab|cd){3,12}[0-9]{1,9}"
REASONING = ("--reasoning-parser", "deepseek-r1")
SAID = 40  # most tokens
# Who is served when, and from which cache. Without a tokenizer there are no grammars.
ORDER = (
    "--skip-tokenizer-init",
    "--disable-radix-cache",
    "--chunked-prefill-size",
    "-1",
    "--schedule-policy",
    "lof",
)
ORDER += ("--prefill-max-requests", "2", "--max-prefill-tokens", "128", "--prefill-decode-interval", "2")
ORDER += ("--scheduler-recv-interval", "2", "--stream-interval", "3", "--incremental-streaming-output")
# Two at a time, so that those with a higher priority put others aside.
PRIORITIES = ("--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "1")
PRIORITIES += ("--default-priority-value", "3", "--retraction-policy", "priority")
PRIORITIES += ("--radix-eviction-policy", "priority", "--grammar-backend", "llguidance")


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


@pytest.fixture(scope="module")
def expected(plain, prompts) -> list[list[int]]:
    return outputs(plain, prompts)


def outputs(server: Endpoint, prompts: list[list[int]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in server.generate_many(prompts, len(prompts), **GREEDY)]


def test_another_order(model, plain, prompts, expected, logs):
    with running(spec("order", model, ORDER), logs) as server:
        for _ in range(2):  # the live tier drafts what was said
            assert outputs(server, prompts) == expected
        pieces = [piece["output_ids"] for piece in server.stream(prompts[0], **GREEDY)]
        assert sum(pieces, []) == expected[0]
        assert len(pieces) > 1
        ours, theirs = (scores(endpoint, prompts[0]) for endpoint in (server, plain))
        assert ours == [pytest.approx(row, abs=2e-3) for row in theirs]


def scores(server: Endpoint, ids: list[int]) -> list[list[float]]:
    """Of two tokens behind two places of a prompt. Such a request wants nothing said."""
    wanted = {"return_logprob": True, "token_ids_logprob": [3, 4], "logprob_start_len": 0}
    answer = server.generate(ids, max_new_tokens=0, top=wanted | {"token_indices_to_pool": [3, 9]})
    assert answer["output_ids"] == [] == answer["meta_info"]["output_token_logprobs"]
    rows = answer["meta_info"]["input_token_ids_logprobs"]
    assert len(rows) == 2
    return [[value for value, *_ in row] for row in rows]


def test_priorities_and_another_grammar_backend(model, plain, prompts, expected, logs):
    constrained = {"temperature": 0, "max_new_tokens": SAID, "regex": EXPRESSION}
    sizes = {"max_running_requests": 2, "max_total_tokens": 1024}
    with running(spec("priorities", model, PRIORITIES, **sizes), logs) as server:

        def ask(place: int) -> dict:
            return server.generate(prompts[place], **GREEDY, top={"priority": 2 * place})

        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(ask, range(len(prompts))))
        assert [answer["output_ids"] for answer in answers] == expected
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
        for ids in prompts[:3]:
            ours, theirs = (endpoint.generate(ids, **constrained)["text"] for endpoint in (server, plain))
            assert ours == theirs and re.fullmatch(EXPRESSION, ours)


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
