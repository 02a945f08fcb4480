"""Two halves of a request through the proxy, over real connections: what ends one ends the other."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from sglang_patches.launch import halves
from sglang_patches.launch.processes import free_port

IN_TIME = 60.0  # much less than an instance waits for its peer
EVENT = b'data: {"text": "a"}\n\n'
Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def connect_seconds(monkeypatch):
    """The product's; a connection takes as long as it likes."""
    product = halves.CONNECT_SECONDS
    monkeypatch.setattr(halves, "CONNECT_SECONDS", IN_TIME)
    return product


class Instance:
    """An HTTP server that behaves as it is told. asked: set when a request has arrived. left: when whoever asked has gone."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked, self.left = asyncio.Event(), asyncio.Event()


@contextlib.asynccontextmanager
async def instance(behave: Behaviour) -> AsyncIterator[Instance]:
    async def handle(request: web.Request) -> web.StreamResponse:
        started.asked.set()
        try:
            return await behave(request)
        except asyncio.CancelledError:
            started.left.set()
            raise

    application = web.Application(client_max_size=0)
    application.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    started = Instance("http://{}:{}".format(*runner.addresses[0]))
    try:
        yield started
    finally:
        await runner.cleanup()


async def waits(request: web.Request) -> web.StreamResponse:
    """As SGLang does for its other half."""
    await asyncio.sleep(600)
    raise AssertionError("nobody ended it")


async def answers(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    return web.json_response({"length": len(body), "path": request.path_qs}, headers={"X-Own": "kept"})


async def dies(request: web.Request) -> web.StreamResponse:
    await request.read()
    request.transport.abort()
    return web.Response()


async def refuses(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "too long"}}, status=400)


def streams(*events: bytes, then: Behaviour | None = None) -> Behaviour:
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
            await asyncio.sleep(0.05)
        if then is not None:
            await then(request)
        return response

    return stream


@contextlib.asynccontextmanager
async def through_the_proxy() -> AsyncIterator[Callable]:
    """Asks as the router does: (url, room) to status and text."""
    async with halves.proxy() as address, aiohttp.ClientSession() as session:

        async def ask(url: str, room: object = 4711, size: int = 0) -> tuple[int, str]:
            body = {"bootstrap_room": room, "text": "x" * size}
            async with session.post(url + "/generate?a=b", json=body, proxy=address) as response:
                return response.status, await response.text()

        yield ask


Asked = asyncio.Task[tuple[int, str]]


def both(
    first: Behaviour,
    second: Behaviour,
    ask_second_after: Callable[[Asked], Awaitable] | None = None,
    leaves: int | None = None,
) -> list[tuple[int, str]]:
    """The answers to a request's halves. ask_second_after: given the first half, what is awaited before the second is asked; if None,
    the second has arrived before the first instance does anything. leaves: which of the two instances must be left before this
    returns."""

    async def run() -> list[tuple[int, str]]:
        async def first_after_second(request: web.Request) -> web.StreamResponse:
            if ask_second_after is None:
                await two.asked.wait()
            return await first(request)

        async with through_the_proxy() as ask, instance(first_after_second) as one, instance(second) as two:
            asked = asyncio.create_task(ask(one.url))
            if ask_second_after is not None:
                await ask_second_after(asked)
            answers = await asyncio.gather(asked, ask(two.url))
            if leaves is not None:
                await (one, two)[leaves].left.wait()
            return answers

    return asyncio.run(asyncio.wait_for(run(), IN_TIME))


def test_an_answer_passes_as_it_is():
    async def run():
        async with instance(answers) as one, halves.proxy() as address, aiohttp.ClientSession() as session:
            body = b'{"bootstrap_room": 1, "text": "' + b"x" * 3_000_000 + b'"}'
            async with session.post(one.url + "/generate?a=b", data=body, proxy=address) as response:
                return response.status, response.headers["X-Own"], await response.json(), len(body)

    status, own, answer, length = asyncio.run(run())
    assert (status, own, answer) == (200, "kept", {"length": length, "path": "/generate?a=b"})


def test_a_stream_passes_as_it_is():
    sent = (EVENT, EVENT, halves.DONE[:6], halves.DONE[6:])
    (status, text), _ = both(streams(*sent), answers)
    assert (status, text) == (200, b"".join(sent).decode())


@pytest.mark.parametrize("after", [None, lambda asked: asyncio.wait([asked])], ids=["before", "after"])
@pytest.mark.parametrize("failing", [dies, streams(then=dies)])
def test_a_half_that_dies_ends_the_other_whichever_comes_first(failing, after):
    dead, other = both(
        failing, waits, after, leaves=None if after else 1
    )  # one that comes later is not asked at all
    assert dead[0] == other[0] == 502 and "failed" in dead[1] and dead[1] == other[1]


def test_an_instance_that_is_not_there_ends_the_other_half(capsys):
    async def run():
        async with through_the_proxy() as ask, instance(waits) as one:
            nobody = f"http://127.0.0.1:{free_port()}"
            asked = asyncio.create_task(ask(one.url))
            await one.asked.wait()
            answers = await asyncio.gather(asked, ask(nobody))
            await one.left.wait()
            return answers

    (status, text), (other, _) = asyncio.run(asyncio.wait_for(run(), IN_TIME))
    assert status == other == 502
    assert "127.0.0.1" not in text  # where it is, is nothing for the client
    assert "Cannot connect" in capsys.readouterr().err


@contextlib.contextmanager
def silent_machine():
    """The address of one that takes no connection and refuses none: its queue of them is full."""
    with contextlib.ExitStack() as sockets:
        listening = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        yield "http://{}:{}".format(*listening.getsockname())


def given_up():
    """What both halves are answered where one instance's machine is silent."""

    async def run(silent):
        async with through_the_proxy() as ask, instance(waits) as one:
            return await asyncio.gather(ask(one.url), ask(silent))

    with silent_machine() as silent:
        answers = asyncio.run(asyncio.wait_for(run(silent), IN_TIME))
    return [status for status, _ in answers]


def test_an_instance_whose_machine_is_silent_is_given_up(monkeypatch):
    monkeypatch.setattr(halves, "CONNECT_SECONDS", 0.2)
    assert given_up() == [502, 502]


@pytest.mark.clock
def test_a_silent_machine_is_given_up_after_three_seconds(monkeypatch, connect_seconds):
    monkeypatch.setattr(halves, "CONNECT_SECONDS", connect_seconds)
    began = time.monotonic()
    assert given_up() == [502, 502]
    assert 3.0 <= time.monotonic() - began < 4.0


def test_an_instances_own_refusal_is_both_halves_answer():
    refused, other = both(refuses, waits, leaves=1)
    assert refused == other == (400, '{"error": {"message": "too long"}}')


@pytest.mark.parametrize(
    "ends", [dies, lambda request: asyncio.sleep(0)]
)  # broken off, or closed as if it were whole
def test_a_stream_that_breaks_off_ends_with_an_error_event(ends):
    (status, text), other = both(streams(EVENT, EVENT, then=ends), waits)
    assert status == 200 and text.startswith((EVENT * 2).decode())
    *_, error, done = text.strip().split("\n\n")
    assert (
        error.strip().startswith('data: {"error":{"message":"an instance failed') and done == "data: [DONE]"
    )
    assert other[0] == 502


def test_a_stream_whose_other_half_fails_ends_with_an_error_event(monkeypatch):
    begun, begin = asyncio.Event(), halves.Answer._begin

    async def noted(*arguments):
        response = await begin(*arguments)
        begun.set()
        return response

    monkeypatch.setattr(halves.Answer, "_begin", noted)
    (status, text), other = both(streams(EVENT, then=waits), dies, lambda asked: begun.wait(), leaves=0)
    assert status == 200 and '"error"' in text and text.endswith(halves.DONE.decode())
    assert other[0] == 502


def test_an_error_as_a_streams_first_event_ends_the_other_half():
    event = b'data: {"error": {"message": "aborted"}}\n\n'
    first, other = both(streams(event, halves.DONE), waits, leaves=1)
    assert first == other == (200, (event + halves.DONE).decode())


def test_other_requests_go_on_and_nothing_is_remembered_of_them(monkeypatch):
    made = []

    class Kept(halves.Halves):
        def __init__(self, client: aiohttp.ClientSession) -> None:
            super().__init__(client)
            made.append(self)

    monkeypatch.setattr(halves, "REMEMBER_SECONDS", 0.1)
    monkeypatch.setattr(halves, "Halves", Kept)

    async def run():
        async with through_the_proxy() as ask, instance(dies) as dead, instance(answers) as well:
            rooms = [1, 2, [3, 4], 5]
            failed = await asyncio.gather(*(ask(dead.url, room) for room in rooms[:2]))
            answered = await asyncio.gather(*(ask(well.url, room) for room in rooms[2:] for _ in range(2)))
            while made[0]._rooms:
                await asyncio.sleep(0.02)
            return failed, answered

    failed, answered = asyncio.run(asyncio.wait_for(run(), IN_TIME))
    assert [status for status, _ in failed] == [502] * 2
    assert [status for status, _ in answered] == [200] * 4


def test_a_client_that_leaves_leaves_the_instance():
    async def run():
        async with through_the_proxy() as ask, instance(waits) as one:
            asked = asyncio.create_task(ask(one.url))
            await one.asked.wait()
            asked.cancel()
            await one.left.wait()

    asyncio.run(asyncio.wait_for(run(), IN_TIME))


def test_the_kernel_asks_after_a_machine_that_is_silent():
    with halves._socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count = (
            made.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
    assert idle + interval * count <= 6
