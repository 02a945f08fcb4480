"""An HTTP proxy between SGLang's router and its instances. When one half of a request fails, it ends the other half.

The router sends a request to a prefill and to a decode instance. It waits for both answers even if one has failed, and the
other instance waits minutes for its peer (SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT). Both halves pass through this proxy and
name the same room. When one fails, the proxy closes the other's connection, on which its instance aborts it, and answers
both with the same error at once. The router then tries another pair or tells the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import AsyncIterator, Iterator

import aiohttp
import orjson
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

CONNECT_SECONDS = 3.0
REMEMBER_SECONDS = 30.0
# A machine that is gone sends no reset. After 2 s of silence TCP asks its kernel three times in three seconds; the kernel answers
# however busy the instance is. Connections are not reused: data sent on one whose peer is gone would wait longer.
KEEPALIVE = {socket.TCP_KEEPIDLE: 2, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 3}
HOP_BY_HOP = frozenset(
    ("connection", "content-length", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding")
)
EVENTS = "text/event-stream"
ERROR_EVENT = b'data: {"error"'
DONE = b"data: [DONE]\n\n"


class HalfFailedError(Exception):
    """A half failed; holds the answer to both halves. body: None to write the message as SGLang writes errors."""

    def __init__(
        self,
        message: str,
        status: int = 502,
        body: bytes | None = None,
        content_type: str = "application/json",
    ) -> None:
        super().__init__(message)
        error = {"message": message, "type": "instance_failed", "code": status}
        self._json = orjson.dumps({"error": error})
        self._status, self._body, self._content_type = status, body, content_type

    def response(self) -> web.Response:
        body = self._json if self._body is None else self._body
        return web.Response(status=self._status, body=body, content_type=self._content_type)

    def events(self) -> bytes:
        """The last events of a stream that has begun, as SGLang ends a failed stream."""
        return b"\n\ndata: " + self._json + b"\n\n" + DONE


class Room:
    """The two halves of one request. failed: done once one of them has failed. halves: how many are present."""

    def __init__(self) -> None:
        self.failed: asyncio.Future[HalfFailedError] = asyncio.get_running_loop().create_future()
        self.halves = 0

    def fail(self, error: HalfFailedError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)


class Halves:
    """Forwards the router's requests to its instances. client: one without decompression and without a total time limit."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client
        self._rooms: dict[object, Room] = {}

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Answers as the instance does, or with the failure of either half."""
        body = await request.read()
        name = _room_name(body)
        answer = Answer(request, paired=name is not None)
        with self._room(name or object()) as room:
            relay = asyncio.create_task(answer.relay(self._client, body))
            try:
                ends: list[asyncio.Future] = [relay, room.failed]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                return (
                    relay.result() if relay.done() else await self._end(relay, answer, room.failed.result())
                )
            except HalfFailedError as error:
                room.fail(error)
                return await answer.end(error)
            except BaseException:  # the router left, or an unexpected error
                room.fail(HalfFailedError("the other half was cancelled"))
                raise
            finally:
                relay.cancel()

    @contextlib.contextmanager
    def _room(self, name: object) -> Iterator[Room]:
        """Exists while a half is in it, and for a while after one has failed: the other may not have arrived yet."""
        room = self._rooms.setdefault(name, Room())
        room.halves += 1
        try:
            yield room
        finally:
            room.halves -= 1
            if room.failed.done():
                asyncio.get_running_loop().call_later(REMEMBER_SECONDS, self._rooms.pop, name, None)
            elif not room.halves:
                del self._rooms[name]

    @staticmethod
    async def _end(relay: asyncio.Task, answer: Answer, error: HalfFailedError) -> web.StreamResponse:
        """Closes the connection to the instance first."""
        relay.cancel()
        await asyncio.gather(relay, return_exceptions=True)
        return await answer.end(error)


def _room_name(body: bytes) -> object | None:
    """The number that the router drew, several for a batch. None for a request without another half, such as a health check."""
    try:
        name = orjson.loads(body).get("bootstrap_room")
    except (orjson.JSONDecodeError, AttributeError):  # no JSON, or no object
        return None
    return tuple(name) if isinstance(name, list) else name


class Answer:
    """The answer to one half. Nothing is sent before the instance's first bytes: until then the half can still fail and the router
    can try elsewhere. paired: whether there is another half."""

    def __init__(self, request: web.Request, paired: bool) -> None:
        self._request, self._paired = request, paired
        self._begun: web.StreamResponse | None = None

    async def relay(self, client: aiohttp.ClientSession, body: bytes) -> web.StreamResponse:
        """Sends the request to the instance and passes on its answer; raises HalfFailedError."""
        request = self._request
        try:
            async with client.request(
                request.method,
                request.url,
                headers=_kept(request.headers),
                data=body or None,
                allow_redirects=False,
            ) as upstream:
                await self._refuse_failure(upstream)
                return await self._pass_on(upstream)
        except (aiohttp.ClientError, OSError) as error:  # OSError: also TimeoutError
            if request.transport is None or request.transport.is_closing():  # the router left
                raise
            raise self._died(f"{type(error).__name__}: {error}") from error

    async def _refuse_failure(self, upstream: aiohttp.ClientResponse) -> None:
        if upstream.status >= 400:
            body = await upstream.read()
            raise HalfFailedError(upstream.reason or "", upstream.status, body, upstream.content_type)

    async def _pass_on(self, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        stream = self._paired and upstream.content_type == EVENTS
        tail = b""
        async for chunk in upstream.content.iter_any():
            response = self._begun
            if response is None:
                if stream and chunk.startswith(ERROR_EVENT):
                    raise HalfFailedError("", upstream.status, chunk + await upstream.content.read(), EVENTS)
                response = await self._begin(upstream)
            tail = (tail + chunk)[-len(DONE) :]
            await response.write(chunk)
        if stream and tail != DONE:
            raise self._died("the stream ended without its last event")
        response = self._begun or await self._begin(upstream)
        await response.write_eof()
        return response

    async def _begin(self, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        self._begun = web.StreamResponse(status=upstream.status, headers=_kept(upstream.headers))
        await self._begun.prepare(self._request)
        return self._begun

    def _died(self, how: str) -> HalfFailedError:
        """Logs the instance's address; the client does not learn it."""
        if self._paired:
            print(
                f"router: the instance {self._request.url.origin()} failed: {how}",
                file=sys.stderr,
                flush=True,
            )
        return HalfFailedError("an instance failed while it served this request")

    async def end(self, error: HalfFailedError) -> web.StreamResponse:
        """Reports the failure: as the answer, as the last events of a stream, or by closing the connection."""
        if self._begun is None:
            return error.response()
        if self._begun.content_type == EVENTS:
            await self._begun.write(error.events())
            await self._begun.write_eof()
        elif self._request.transport is not None:
            self._request.transport.close()
        return self._begun


def _kept(headers) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in HOP_BY_HOP]


def _socket(address) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def _worth_a_line(record: logging.LogRecord) -> bool:
    """Drops the errors of the router's first request to each new instance, which asks whether it speaks gRPC."""
    return not (record.exc_info and isinstance(record.exc_info[1], BadHttpMessage))


_log = logging.getLogger(__name__)
_log.addFilter(_worth_a_line)


@contextlib.asynccontextmanager
async def proxy() -> AsyncIterator[str]:
    """Serves on a free loopback port; yields its base URL."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_socket)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    skipped = ("Accept", "Accept-Encoding", "User-Agent")
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, auto_decompress=False, skip_auto_headers=skipped
    ) as client:
        application = web.Application(client_max_size=0)  # the router has a limit
        application.router.add_route("*", "/{path:.*}", Halves(client).forward)
        # A client that leaves ends its halves on the instances too.
        runner = web.AppRunner(
            application, handler_cancellation=True, access_log=None, logger=_log, shutdown_timeout=1
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()
