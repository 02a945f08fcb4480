"""The page's server in front of two stand-ins of SGLang: what it asks them, what it tells the page, and what it says when one fails."""

import contextlib
import json
import random

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse

from sglang_patches.launch.demo_page.answers import ANSWER_TOKENS, Server, pieces
from sglang_patches.launch.demo_page.application import QUESTION_CHARACTERS, application
from sglang_patches.launch.processes import free_port
from tests.support.sglang_stand_in import END, StandIn, byte_tokenizer, serving
from tests.waiting import eventually

TOKENIZER = byte_tokenizer()
ANSWER = "By the sea: 😀 é\u2028\x85\n"
OUTPUT = TOKENIZER.encode(ANSWER + END).ids
SOURCES = ["target", "prior", "prior", "session", "live"] * 5


def plain_stand_in() -> StandIn:
    return StandIn(TOKENIZER, OUTPUT)


def method_stand_in() -> StandIn:
    return StandIn(TOKENIZER, OUTPUT, per_step=3, sources=SOURCES[: len(OUTPUT)])


class Demo:
    """The page's server, and the stand-ins behind it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.plain, self.method = plain_stand_in(), method_stand_in()
        plain_url, method_url = (
            stack.enter_context(serving(s.application())) for s in (self.plain, self.method)
        )
        self.url = stack.enter_context(self.page(plain_url, method_url))
        self.client = stack.enter_context(httpx.Client(base_url=self.url, trust_env=False, timeout=60))

    def reset(self) -> None:
        """As they were at the start: starting servers takes longer than a test."""
        vars(self.plain).update(vars(plain_stand_in()))
        vars(self.method).update(vars(method_stand_in()))

    def page(self, plain_url: str, method_url: str):
        return serving(
            application(
                "/models/tiny",
                Server("plain decoding", plain_url, drafts=False),
                Server("SSSD", method_url, drafts=True),
                TOKENIZER,
            )
        )

    def ask(self, server: str, question: str = "Where is the sea?") -> list[dict]:
        reply = self.client.post("/ask", json={"question": question, "server": server})
        assert reply.status_code == 200, reply.text
        return [json.loads(line) for line in reply.text.splitlines()]

    def refusal(self, **request) -> tuple[int, str]:
        reply = self.client.post("/ask", **request)
        return reply.status_code, reply.json()["error"]


@pytest.fixture(scope="module")
def started():
    with contextlib.ExitStack() as stack:
        yield Demo(stack)


@pytest.fixture
def demo(started):
    started.reset()
    return started


def test_the_answer_grows_and_ends_with_each_token_and_who_proposed_it(demo):
    *growing, last = demo.ask("method")
    assert [message["tokens"] for message in growing] == [*range(1, len(OUTPUT), 3), len(OUTPUT)]
    assert [message["steps"] for message in growing] == [*range(len(growing))]
    assert growing[-1]["text"] == ANSWER and ANSWER.startswith(growing[1]["text"])
    answer = last["answer"]
    assert [token["id"] for token in answer["tokens"]] == OUTPUT
    assert [token["source"] for token in answer["tokens"]] == SOURCES[: len(OUTPUT)]
    assert "".join(token["text"] for token in answer["tokens"]) == ANSWER
    assert (answer["steps"], answer["cut"]) == (len(growing) - 1, False)
    assert answer["seconds"] == growing[-1]["seconds"] > 0


def test_plain_decoding_is_a_token_a_step_and_all_its_own(demo):
    *growing, last = demo.ask("plain")
    assert len(growing) == len(OUTPUT)
    assert last["answer"]["steps"] == len(OUTPUT) - 1
    assert {token["source"] for token in last["answer"]["tokens"]} == {"target"}


def test_both_are_asked_the_same_and_greedily(demo):
    demo.ask("plain")
    demo.ask("method")
    (plain,), (method,) = demo.plain.asked, demo.method.asked
    assert plain["input_ids"] == method["input_ids"] == TOKENIZER.encode("Where is the sea?").ids
    assert plain["sampling_params"] == {"temperature": 0, "max_new_tokens": ANSWER_TOKENS}
    wishes = {"custom_params": {"specstore": {"sources": True}}}
    assert method["sampling_params"] == plain["sampling_params"] | wishes


def test_a_long_answer_is_cut_and_says_so(demo):
    demo.plain.output = OUTPUT[:5] * ANSWER_TOKENS
    answer = demo.ask("plain")[-1]["answer"]
    assert answer["cut"] and len(answer["tokens"]) == ANSWER_TOKENS


@pytest.mark.parametrize("ids", [OUTPUT, [random.Random(seed).randrange(256) for seed in range(300)]])
def test_pieces_joined_are_the_text(ids):
    shown = pieces(TOKENIZER, ids)
    assert len(shown) == len(ids)
    whole = TOKENIZER.decode(ids)
    joined = "".join(shown)
    assert whole.startswith(joined) and set(whole[len(joined) :]) <= {"\ufffd"}


def test_a_character_of_several_tokens_is_the_last_one_s():
    assert pieces(TOKENIZER, TOKENIZER.encode("a the😀" + END).ids) == ["a", " the", "", "", "", "😀", ""]


def test_the_settings_name_what_the_page_shows(demo):
    told = demo.client.get("/settings").json()
    assert (told["model"], told["names"]) == ("tiny", {"plain": "plain decoding", "method": "SSSD"})
    assert len(told["samples"]) == 3 and all(s["question"] and s["about"] for s in told["samples"])
    assert told["answer_tokens"] == ANSWER_TOKENS


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"),
        ("/page.js", "text/javascript"),
        ("/page.css", "text/css"),
        ("/settings", "application/json"),
    ],
)
def test_files_are_served_under_a_policy_that_lets_nothing_else_in(demo, path, kind):
    reply = demo.client.get(path)
    assert reply.status_code == 200 and reply.headers["content-type"].startswith(kind)
    policy = reply.headers["content-security-policy"].split("; ")
    assert "default-src 'none'" in policy
    assert "unsafe" not in "".join(policy) and "http" not in "".join(policy)
    assert "//" not in reply.text.replace("// ", "") or kind == "application/json", "an address elsewhere"


def test_a_name_that_is_not_this_machine_s_is_refused(demo):
    assert demo.client.get("/settings", headers={"Host": "elsewhere.example"}).status_code == 400


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("", "question: it is empty"),
        (" \n", "question: it is empty"),
        (
            "a" * (QUESTION_CHARACTERS + 1),
            "question: too long, the limit is 8,000 characters; this one has 8,001",
        ),
        ("a" * 20 * QUESTION_CHARACTERS, "question: too long, the limit is 8,000 characters"),
    ],
)
def test_a_bad_question_is_refused_by_its_limit(demo, question, words):
    assert demo.refusal(json={"question": question, "server": "plain"}) == (400, words)
    assert demo.plain.asked == []


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"json": {"question": "a"}}, "give question and server, two strings"),
        ({"json": {"question": 1, "server": "plain"}}, "give question and server, two strings"),
        ({"json": {"question": "a", "server": "x"}}, "server: 'x': give one of plain, method"),
        (
            {"json": {"question": "a", "server": "plain"}, "headers": {"Content-Type": "text/plain"}},
            "Content-Type: give application/json",
        ),
        ({"content": b"{", "headers": {"Content-Type": "application/json"}}, "the body is not JSON"),
        (
            {"content": b"[" * 100_000, "headers": {"Content-Type": "application/json"}},
            "the body is not JSON",
        ),
        (
            {
                "content": b'{"question": "\\ud800", "server": "plain"}',
                "headers": {"Content-Type": "application/json"},
            },
            "question: it has half of a surrogate pair",
        ),
    ],
)
def test_a_bad_request_is_refused_by_name(demo, request_, words):
    assert demo.refusal(**request_) == (400, words)


def test_a_question_longer_than_the_context_is_refused_in_the_server_s_words(demo):
    demo.method.context = 100
    (refused,) = demo.ask("method")
    assert refused["error"].startswith("SSSD: the server refused the question: ")
    assert "maximum context length of 100 tokens" in refused["error"]


def test_a_refusal_by_the_scheduler_is_told_too(demo):
    message = {
        "text": "",
        "output_ids": [],
        "meta_info": {"finish_reason": {"type": "abort", "message": "too long: 9 > 8"}},
    }
    demo.method.reply = PlainTextResponse(f"data: {json.dumps(message)}\n\ndata: [DONE]\n\n")
    assert demo.ask("method") == [{"error": "SSSD: the server refused the question: too long: 9 > 8"}]


def test_a_refused_request_is_told_with_its_status(demo):
    demo.plain.reply = JSONResponse({"error": "no such field"}, 400)
    (refused,) = demo.ask("plain")
    assert refused["error"].startswith("plain decoding: the server answered with status 400: ")
    assert "no such field" in refused["error"]


def test_an_answer_that_breaks_off_is_told(demo):
    demo.method.breaks_after = 2
    *growing, last = demo.ask("method")
    assert len(growing) == 2
    assert last == {"error": "SSSD: the server broke its answer off; `make demo` shows its log"}


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        (None, "SSSD: meta_info has no specstore.sources"),
        (["prior"] * 3, f"SSSD: meta_info has 3 sources of {len(OUTPUT)} tokens"),
    ],
)
def test_an_answer_without_its_sources_is_an_error(demo, sources, words):
    demo.method.sources = sources
    assert demo.ask("method")[-1]["error"].startswith(words)


def test_a_message_of_another_form_is_an_error(demo):
    demo.plain.reply = PlainTextResponse('data: {"text": "a"}\n\n')
    assert demo.ask("plain") == [
        {"error": "plain decoding: a message without text, output_ids and meta_info"}
    ]


def test_a_server_that_is_gone_is_named(demo):
    nowhere = f"http://127.0.0.1:{free_port()}"
    with demo.page(nowhere, nowhere) as url:
        question = {"question": "a", "server": "plain"}
        reply = httpx.post(f"{url}/ask", json=question, trust_env=False, timeout=60)
    assert reply.json() == {
        "error": f"plain decoding: the server at {nowhere} cannot be reached; `make demo` shows its log"
    }


def test_a_second_question_does_not_share_the_cores_and_the_reader_s_end_ends_the_answer(demo):
    demo.plain.seconds = 1.0
    with demo.client.stream("POST", "/ask", json={"question": "a", "server": "plain"}) as reply:
        lines = reply.iter_lines()
        next(lines)
        with httpx.Client(base_url=demo.url, trust_env=False, timeout=60) as other:
            refused = other.post("/ask", json={"question": "b", "server": "method"})
        assert refused.status_code == 409 and "another question" in refused.json()["error"]
    eventually(lambda: demo.plain.ended_early, "the stand-in goes on")
    question = {"question": "b", "server": "method"}
    eventually(lambda: demo.client.post("/ask", json=question).status_code == 200, "the page is still busy")
    assert demo.ask("method")[-1]["answer"]["tokens"]
