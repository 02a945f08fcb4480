"""What is asked, what is asked again, and what ends a run. The server is a stand-in on the loopback."""

import asyncio
import threading

import pytest

from datastore_service.answers import chat_server
from datastore_service.answers.asking import Wishes, ask_all
from datastore_service.answers.chat_server import Answer, ChatServer
from datastore_service.answers.errors import ModelServerError
from datastore_service.answers.prompts import Prompt, Question
from tests.unit.answers.stand_in import BROKEN, answered, standing_in

PROMPT = Prompt("why?", "file: document 1")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(chat_server, "RETRY_SECONDS", (0.0, 0.0, 0.0))


def ask(url: str, temperature: float = 0.0, key: str = "") -> Answer:
    async def run() -> Answer:
        async with ChatServer(url, key) as server:
            return await server.answer(PROMPT, temperature, 7)

    return asyncio.run(run())


def check(url: str, key: str = "") -> None:
    async def run() -> None:
        async with ChatServer(url, key) as server:
            await server.check()

    asyncio.run(run())


def test_a_request_asks_for_what_a_corpus_needs():
    with standing_in(lambda body: answered("so", [1, 2])) as server:
        assert ask(server.url + "/", 0.5, "secret") == Answer("so", [1, 2])
        (body,) = server.requests
    assert server.headers["path"] == "/v1/chat/completions"
    assert server.headers["Authorization"] == "Bearer secret"
    assert body["messages"] == [{"role": "user", "content": "why?"}]
    assert (body["temperature"], body["max_tokens"]) == (0.5, 7)
    assert body["return_token_ids"] and not body["separate_reasoning"]
    assert body["custom_params"] == {"specstore": {"publish": False}}


def test_a_server_that_tells_no_ids():
    with standing_in(lambda body: answered("so")) as server:
        assert ask(server.url) == Answer("so", None)
        assert "Authorization" not in server.headers


@pytest.mark.parametrize(
    "failure",
    [(503, {"message": "busy"}), (500, b""), (429, {}), BROKEN, answered("half", [1], reason="abort")],
    ids=str,
)
def test_a_passing_failure_is_tried_again(failure):
    replies = iter([failure] * 3 + [answered("so", [1])])
    with standing_in(lambda body: next(replies)) as server:
        assert ask(server.url) == Answer("so", [1])


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ((503, {"message": "too\nbusy"}), "503: too busy"),
        (BROKEN, "Server disconnected"),
        (answered("half", reason="abort"), "broke off"),
    ],
)
def test_the_tries_are_counted(failure, reason):
    with standing_in(lambda body: failure) as server:
        with pytest.raises(
            ModelServerError, match=rf"server: {server.url}: no answer in 4 tries: .*{reason}"
        ):
            ask(server.url)
        assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (
            {"object": "error", "message": "The input (9 tokens)\nis too long"},
            "The input (9 tokens) is too long",
        ),
        ({"error": {"message": "no template"}}, "no template"),
        ({"error": "no template"}, "no template"),
        (b"<html>", "<html>"),
        (b"", "Bad Request"),
        ({"detail": "x" * 1000}, '{"detail": "' + "x" * 288),
    ],
)
def test_a_refused_prompt_is_named_and_not_asked_again(reply, reason):
    with standing_in(lambda body: (400, reply)) as server:
        with pytest.raises(ModelServerError) as error:
            ask(server.url)
        assert str(error.value) == f"file: document 1: refused by {server.url}: 400: {reason}"
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((200, b"<html>"), "its answer is not JSON"),
        ((200, {}), "no text in choices[0].message.content"),
        ((200, []), "no text in choices[0].message.content"),
        ((200, {"choices": []}), "no text in choices[0].message.content"),
        ((200, {"choices": [{"message": {"content": None}}]}), "no text in choices[0].message.content"),
        (answered("so", ["a"]), "response_token_ids: not a list of token ids"),
        (answered("so", [True]), "response_token_ids: not a list of token ids"),
        (answered("so", 5), "response_token_ids: not a list of token ids"),
        ((302, b""), "refused by"),
    ],
)
def test_an_answer_that_is_none(reply, reason):
    with standing_in(lambda body: reply) as server, pytest.raises(ModelServerError) as error:
        ask(server.url)
    assert reason in str(error.value)


@pytest.mark.parametrize("url", ["", "x", "127.0.0.1:30000", "ftp://a", "http://", "http://a:x"])
def test_an_address_of_another_form(url):
    with pytest.raises(ValueError, match=rf"server: '{url}' is not http://HOST:PORT"):
        ChatServer(url)


def test_the_check_tells_what_is_wrong(free_port):
    with standing_in(lambda body: BROKEN) as server:
        check(server.url, "secret")
        assert server.headers["Authorization"] == "Bearer secret"
        server.models = 401
        with pytest.raises(ModelServerError, match=f"server: {server.url}: 401: "):
            check(server.url)
    with pytest.raises(
        ModelServerError, match=rf"server: http://127.0.0.1:{free_port}: cannot be reached: ."
    ):
        check(f"http://127.0.0.1:{free_port}")


def run_all(url: str, questions: list[Question], concurrency: int) -> list[tuple[Question, Answer]]:
    got = []

    async def run() -> None:
        async with ChatServer(url, connections=concurrency) as server:
            await ask_all(server, questions, Wishes(0.8, 7, concurrency), lambda *pair: got.append(pair))

    asyncio.run(run())
    return got


def questions_of(count: int, round: int = 1) -> list[Question]:
    return [Question(Prompt(f"p{i}", f"file: document {i + 1}"), round) for i in range(count)]


def test_as_many_as_wished_are_asked_at_a_time():
    all_here = threading.Barrier(8)

    def reply(body):
        all_here.wait(60)
        return answered(body["messages"][0]["content"].upper(), [1])

    with standing_in(reply) as server:
        got = run_all(server.url, questions_of(24), 8)
        assert server.most == 8
    assert sorted((question.prompt.text, answer.text) for question, answer in got) == sorted(
        (f"p{i}", f"P{i}") for i in range(24)
    )


def test_the_first_round_is_greedy_and_the_others_are_sampled():
    with standing_in(lambda body: answered("so")) as server:
        run_all(server.url, questions_of(1) + questions_of(2, round=2), 1)
        assert [body["temperature"] for body in server.requests] == [0.0, 0.8, 0.8]


def test_the_first_failure_ends_all_and_what_was_answered_stays():
    hold = threading.Event()

    def reply(body):
        text = body["messages"][0]["content"]
        if text == "p2":
            return 400, {"message": "no"}
        if text == "p1":
            hold.wait(60)
        return answered(text)

    got = []

    async def run(url: str) -> None:
        async with ChatServer(url, connections=2) as server:
            await ask_all(server, questions_of(9), Wishes(1.0, 7, 2), lambda *pair: got.append(pair))

    with standing_in(reply) as server:
        with pytest.raises(ModelServerError, match="document 3: refused"):
            asyncio.run(run(server.url))
        hold.set()
        assert sorted(server.prompts) == ["p0", "p1", "p2"]
    assert [question.prompt.text for question, _ in got] == ["p0"]
