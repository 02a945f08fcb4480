"""`make demo` for real: the demo model answers a question in the page, twice, with and without the method."""

import json
import signal
import time

import httpx
import pytest

from sglang_patches.launch.demo_page.application import SAMPLES
from tests.e2e.test_serve import ends_without_a_trace, launched

QUESTION = SAMPLES[1][0]  # the prior has no answer to it
LONG_QUESTION = "😀" * 4000  # three tokens each, and the model's context has 8192
ANSWER_SECONDS = 300

pytestmark = pytest.mark.long


def ask(url: str, server: str, question: str = QUESTION) -> tuple[list[dict], dict]:
    """The messages while the answer grows, and the last one."""
    body = {"question": question, "server": server}
    reply = httpx.post(f"{url}ask", json=body, timeout=ANSWER_SECONDS, trust_env=False)
    assert reply.status_code == 200, reply.text
    *growing, last = map(json.loads, reply.text.splitlines())
    return growing, last


def complete(url: str, server: str) -> dict:
    growing, last = ask(url, server)
    assert "answer" in last, last
    answer = last["answer"]
    assert "".join(token["text"] for token in answer["tokens"]) == growing[-1]["text"] != ""
    counts = [message["tokens"] for message in growing]
    assert counts == sorted(counts) and len(counts) > 1
    return answer


def sources(answer: dict) -> list[str]:
    return [token["source"] for token in answer["tokens"]]


def ids(answer: dict) -> list[int]:
    return [token["id"] for token in answer["tokens"]]


def test_the_page_compares_real_servers_and_leaves_nothing_behind(demo_model, free_port, tmp_path):
    with launched(free_port, tmp_path / "out", "sglang_patches.launch.demo") as launcher:
        url = launcher.wait_until_ready()
        assert "<title>specstore" in httpx.get(url, timeout=60, trust_env=False).text
        plain, first, again = (complete(url, server) for server in ("plain", "method", "method"))
        limit = time.monotonic() + ANSWER_SECONDS
        while sources(again).count("live") <= sources(first).count("live"):
            assert time.monotonic() < limit, "nothing comes from the answer before"
            again = complete(url, "method")
        assert ids(plain) == ids(first) == ids(again)
        assert set(sources(plain)) == {"target"} and plain["steps"] == len(ids(plain)) - 1
        for answer in (first, again):
            assert sources(answer)[0] == "target", "it comes with the prompt"
            # Each step ends with a token of the target, but the last one if the answer was cut within its drafts.
            assert sources(answer).count("target") - 1 in (answer["steps"], answer["steps"] - 1)
        assert again["steps"] < first["steps"] <= plain["steps"]
        _, refused = ask(url, "method", LONG_QUESTION)
        assert refused["error"].startswith("SSSD: the server refused the question: ")
        assert "context length" in refused["error"]
        assert complete(url, "method")["tokens"], "it goes on"
        launcher.signal(signal.SIGINT)
        ends_without_a_trace(launcher, 0)


def test_the_page_s_end_ends_everything(demo_model, free_port, tmp_path):
    with launched(free_port, tmp_path / "out", "sglang_patches.launch.demo") as launcher:
        launcher.wait_for("sglang_patches.launch.demo_page", 1)
        launcher.child("sglang_patches.launch.demo_page").kill()
        ends_without_a_trace(launcher, 1)
    assert "error: page ended with status -9" in (tmp_path / "out").read_text()
