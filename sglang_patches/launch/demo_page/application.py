"""The page's HTTP application: its files, `/settings`, and `/ask`, which passes a question to one of the two SGLang servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from sglang_patches.launch.demo_page.answers import ANSWER_TOKENS, AnswerError, Server, answer, open_client

FOLDER = Path(__file__).parent
FILES = {"/": "index.html", "/page.js": "page.js", "/page.css": "page.css"}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
HOSTS = ("127.0.0.1", "localhost")  # a page elsewhere that resolves its own name to this machine is refused
QUESTION_CHARACTERS = 8000
BODY_BYTES = 16 * QUESTION_CHARACTERS  # JSON may write a character as two escapes of six bytes
# Each shows another source of drafts. The prior is made from the demo model's answers to demo/prompts.txt.
SAMPLES = (
    ("Why is the sky blue?", "the prior has an answer to it"),
    ("Why do leaves change color in autumn?", "no answer is known"),
    (
        "Correct the spelling of this text: The museum opens at nine in the morning and closes at five in the evening. "
        "Tickets cost eight dollars for adults and four dollars for children. The museum is closd on Mondays.",
        "the answer repeats the question's text",
    ),
)


class BadRequestError(ValueError):
    """Names the field and what it may be."""


def application(model: str, plain: Server, method: Server, tokenizer: Tokenizer) -> Starlette:
    """Makes the page's HTTP application.

    model: folder or name, as the page shows it.
    tokenizer: the model's.
    """
    page = _Page(model, {"plain": plain, "method": method}, tokenizer)
    routes = [Route(path, _file(name)) for path, name in FILES.items()]
    routes += [Route("/settings", page.settings), Route("/ask", page.ask, methods=["POST"])]
    return Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False)],
        lifespan=page.lifespan,
    )


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def send(_: Request) -> Response:
        return FileResponse(FOLDER / name, headers=HEADERS)

    return send


class _Page:
    def __init__(self, model: str, servers: Mapping[str, Server], tokenizer: Tokenizer) -> None:
        self._model, self._servers, self._tokenizer = model, servers, tokenizer
        self._one = asyncio.Lock()

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with open_client() as self._client:
            yield

    async def settings(self, _: Request) -> Response:
        told = {
            "model": Path(self._model).name,
            "names": {key: server.name for key, server in self._servers.items()},
            "samples": [{"question": question, "about": about} for question, about in SAMPLES],
            "answer_tokens": ANSWER_TOKENS,
        }
        return JSONResponse(told, headers=HEADERS)

    async def ask(self, request: Request) -> Response:
        """The messages of `answers.answer` as lines of JSON, or `error` in their place."""
        try:
            question, server = await self._read(request)
        except BadRequestError as error:
            return _error(400, str(error))
        if self._one.locked():
            return _error(
                409, "another question is being answered, and two would share the cores: ask when it is done"
            )
        return StreamingResponse(
            self._lines(server, question), media_type="application/x-ndjson", headers=HEADERS
        )

    async def _read(self, request: Request) -> tuple[str, Server]:
        # What a page of another origin may send without asking first has another type.
        if request.headers.get("content-type") != "application/json":
            raise BadRequestError("Content-Type: give application/json")
        raw = await _body(request)
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            raise BadRequestError("the body is not JSON") from None
        match body:
            case {"question": str(question), "server": str(key)}:
                return _checked(question), self._server(key)
        raise BadRequestError("give question and server, two strings")

    def _server(self, key: str) -> Server:
        if key not in self._servers:
            raise BadRequestError(f"server: {key!r}: give one of {', '.join(self._servers)}")
        return self._servers[key]

    async def _lines(self, server: Server, question: str) -> AsyncIterator[bytes]:
        """A reader that goes away ends the answer, here and at the SGLang server."""
        messages = answer(self._client, server, question, self._tokenizer)
        async with self._one, aclosing(messages):
            try:
                async for message in messages:
                    yield _line(message)
            except AnswerError as error:
                yield _line({"error": str(error)})


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES:
            raise BadRequestError(f"question: {_TOO_LONG}")
    return body


_TOO_LONG = f"too long, the limit is {QUESTION_CHARACTERS:,} characters"


def _checked(question: str) -> str:
    if not question.strip():
        raise BadRequestError("question: it is empty")
    if len(question) > QUESTION_CHARACTERS:
        raise BadRequestError(f"question: {_TOO_LONG}; this one has {len(question):,}")
    try:
        question.encode()
    except UnicodeEncodeError:
        raise BadRequestError("question: it has half of a surrogate pair") from None
    return question


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _error(status: int, words: str) -> Response:
    return JSONResponse({"error": words}, status, HEADERS)
