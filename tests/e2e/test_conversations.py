"""Sessions that public clients name on the wire, unchanged clients and a real server: what the first request of a session said drafts for the
second, and for no other session."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_patches.entry.request_conversations import UNUSABLE
from tests.e2e import clients
from tests.e2e.clients import TOKENS
from tests.support.servers.engine import ServerSpec
from tests.support.servers.forked import SglangServer, running
from tests.support.servers.metrics import metric

TENANT = "x-tenant"
FLAGS = ("--specstore-endpoint", "embedded", "--specstore-publish", "off", "--specstore-length", "static")
FLAGS += ("--specstore-request-tenant", f"header:{TENANT}", "--enable-metrics")


@pytest.fixture(scope="module")
def server(demo_model, logs) -> Iterator[SglangServer]:
    spec = ServerSpec(
        "conversations", demo_model, "SSSD", dtype="float32", flags=FLAGS, max_total_tokens=8192
    )
    with running(spec, logs) as server:
        yield server


@pytest.fixture(autouse=True)
def directly(monkeypatch) -> None:
    """The clients' requests pass no proxy."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


CLIENTS: dict[str, tuple[str, Callable]] = {
    "OpenAI, chat": ("body:prompt_cache_key", clients.openai_chat),
    "OpenAI, streamed chat": ("body:prompt_cache_key", clients.openai_stream),
    "OpenAI, completions": ("header:session-id", clients.openai_completions),
    "OpenAI, responses": ("body:prompt_cache_key", clients.openai_responses),
    "Anthropic": ("body:metadata.user_id.session_id", clients.anthropic),
    "SGLang": ("body:conversation_id", clients.sglang),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_two_requests_of_a_session_are_one_conversation(server, client):
    source, ask = CLIENTS[client]

    def accepted(session: str, tenant: str = "") -> tuple[str, float]:
        """The answer, and how many of its tokens the session had drafted."""
        count = lambda: metric(server.url, "specstore_accepted_nodes_total", source="session")  # noqa: E731
        before = count()
        answer = ask(server, session, {TENANT: tenant})
        return answer, count() - before

    def named() -> float:
        return metric(server.url, "specstore_request_conversations_total", source=source)

    before = named()
    answer, first = accepted(client)
    answers, counts = zip(
        *(accepted(*who) for who in [(client,), (f"not {client}",), (client, "a tenant")]), strict=True
    )
    again, other, of_tenant = counts
    print(client, first, counts)
    assert set(answers) == {answer} and answer
    assert again >= TOKENS / 2 > 2 * max(first, other, of_tenant)
    assert named() - before == 4


def test_what_is_no_name_fails_no_request(server):
    unusable = metric(server.url, "specstore_request_conversations_total", source=UNUSABLE)
    assert clients.openai_chat(server, "x" * 257, {}) == clients.openai_chat(server, "", {})
    assert metric(server.url, "specstore_request_conversations_total", source=UNUSABLE) == unusable + 1


AGENT = Path(__file__).parents[2] / "examples" / "agent_loop.py"
TURN = re.compile(
    r"^turn \d+: (\d+) tokens in (\d+) steps, \S+ a step, (\d+) of them predicted: (.*)$", re.MULTILINE
)


def test_the_agent_of_the_example_says_the_same_whatever_it_tells_the_server(server):
    def turns(*words: str) -> list[tuple[int, int, int, str]]:
        command = [sys.executable, str(AGENT), "--url", f"{server.url}/v1", "--turns", "2", *words]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        print(said)
        return [(int(a), int(b), int(c), outcome) for a, b, c, outcome in TURN.findall(said)]

    hinted, plainly = turns(), turns("--plainly")
    assert [(tokens, outcome) for tokens, _, _, outcome in hinted] == [
        (tokens, outcome) for tokens, _, _, outcome in plainly
    ]
    assert hinted and all(0 < steps < tokens for tokens, steps, _, _ in hinted)
    assert all(predicted == 0 for _, _, predicted, _ in plainly)


PROMPT = range(1000, 1040)


def test_a_sibling_drafts_from_an_answer_that_is_still_being_written(server):
    """And no other group's request does, nor another tenant's with the same name."""

    def drafted_beside(group: str, tenant: str = "") -> tuple[list[int], int, int]:
        """The tokens of an answer that began while another of group "a" was written, its steps, and how many tokens of other answers it took."""
        asked = {"temperature": 0, "ignore_eos": True}
        named = {"custom_params": {"specstore": {"group": "a"}}}
        writing = server.stream(list(PROMPT), max_new_tokens=600, **asked, **named)
        assert any(len(message["output_ids"]) >= 60 for message in writing)
        answer = server.generate(
            list(PROMPT),
            max_new_tokens=48,
            custom_params={"specstore": {"group": group}},
            headers={TENANT: tenant},
            **asked,
        )
        assert len(list(writing)) > 0
        said = answer["meta_info"]["specstore"]
        return answer["output_ids"], said["steps"], said["accepted"].get("live", 0)

    beside = {"sibling": drafted_beside("a"), "other group": drafted_beside("b")}
    beside["other tenant"] = drafted_beside("a", tenant="acme")
    tokens, steps, taken = zip(*beside.values(), strict=True)
    assert tokens[0] == tokens[1] == tokens[2]
    assert taken[0] > 0 == taken[1] == taken[2], beside
    assert steps[0] < min(steps[1:]), beside
