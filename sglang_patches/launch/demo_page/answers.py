"""One SGLang server's greedy answer to a question, as what the page shows: how far it is, then each token with its source."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

ANSWER_TOKENS = 128  # of an answer at most
CONNECT_SECONDS = 10.0
SILENT_SECONDS = 600.0  # without a byte; a long prompt on a small machine takes minutes
SHOWN_CHARACTERS = 500  # of a server's reason
TARGET = "target"  # source of a token that nobody drafted, as meta_info names it


@dataclass(frozen=True)
class Server:
    """One of the SGLang servers that the page asks.

    name: as the page shows it.
    drafts: whether its answers say who proposed their tokens; else it is plain decoding.
    """

    name: str
    url: str
    drafts: bool


class AnswerError(RuntimeError):
    """No answer; the message is for the page."""


def open_client() -> httpx.AsyncClient:
    """Goes to loopback directly, whatever proxy the environment names."""
    timeout = httpx.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS)
    return httpx.AsyncClient(timeout=timeout, trust_env=False)


async def answer(
    client: httpx.AsyncClient, server: Server, question: str, tokenizer: Tokenizer
) -> AsyncGenerator[dict[str, Any], None]:
    """First messages with `text` so far, `tokens`, `seconds` since the server was asked, and `steps` after the prompt's, of which SGLang may
    have joined some. The last message has `answer`: `tokens` (id, text and source of each), `seconds`, `steps`, and `cut`:
    whether the answer reached ANSWER_TOKENS. Raises `AnswerError`."""
    try:
        ids = await _prompt(client, server, question)
        began = time.monotonic()
        message: dict[str, Any] = {}
        steps = -1
        async with aclosing(_messages(client, server, ids)) as messages:
            async for message in messages:
                steps += 1
                seconds = time.monotonic() - began
                count = len(message["output_ids"])
                yield {"text": message["text"], "tokens": count, "seconds": seconds, "steps": steps}
    except httpx.TransportError as error:
        raise AnswerError(_gone(server, error)) from error
    if not message:
        raise AnswerError(f"{server.name}: the server sent no answer")
    yield {"answer": _complete(server, message, tokenizer) | {"seconds": seconds}}


async def _prompt(client: httpx.AsyncClient, server: Server, question: str) -> list[int]:
    """Token ids of the question in the model's chat template, as SGLang renders it for a chat completion."""
    body = {"messages": [{"role": "user", "content": question}]}
    response = await client.post(f"{server.url}/tokenize", json=body)
    if response.status_code != httpx.codes.OK:
        raise AnswerError(_refused(server, response))
    return response.json()["tokens"]


async def _messages(
    client: httpx.AsyncClient, server: Server, ids: Sequence[int]
) -> AsyncGenerator[dict[str, Any], None]:
    """Each has the whole output so far."""
    body = {"input_ids": ids, "sampling_params": _sampling(server), "stream": True}
    async with client.stream("POST", f"{server.url}/generate", json=body) as response:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            raise AnswerError(_refused(server, response))
        async for line in _lines(response):
            if line == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                yield _checked(server, json.loads(line.removeprefix(b"data: ")))
    raise AnswerError(f"{server.name}: the server broke its answer off; `make demo` shows its log")


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """httpx's own lines also end at U+2028 and others, which JSON may hold."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line


def _sampling(server: Server) -> dict[str, Any]:
    greedy: dict[str, Any] = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS}
    return greedy | {"custom_params": {"specstore": {"sources": True}}} if server.drafts else greedy


def _checked(server: Server, message: dict[str, Any]) -> dict[str, Any]:
    match message:
        case {"error": {"message": str(reason)}} | {
            "meta_info": {"finish_reason": {"type": "abort", "message": str(reason)}}
        }:
            raise AnswerError(f"{server.name}: the server refused the question: {reason[:SHOWN_CHARACTERS]}")
        case {"text": str(), "output_ids": list(), "meta_info": dict()}:
            return message
    raise AnswerError(f"{server.name}: a message without text, output_ids and meta_info")


def _complete(server: Server, message: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    ids: list[int] = message["output_ids"]
    steps, sources = _drafting(server, message)
    if len(sources) != len(ids):
        raise AnswerError(f"{server.name}: meta_info has {len(sources)} sources of {len(ids)} tokens")
    rows = zip(ids, pieces(tokenizer, ids), sources, strict=True)
    return {
        "tokens": [{"id": token, "text": text, "source": source} for token, text, source in rows],
        "steps": steps,
        "cut": (message["meta_info"].get("finish_reason") or {}).get("type") == "length",
    }


def _drafting(server: Server, message: dict[str, Any]) -> tuple[int, list[str]]:
    """Steps after the prompt's, and who proposed each token."""
    if not server.drafts:
        count = len(message["output_ids"])
        return max(count - 1, 0), [TARGET] * count  # the first token comes with the prompt's forward
    match message["meta_info"]:
        case {"specstore": {"steps": int(steps), "sources": list(sources)}}:
            return steps, sources
    raise AnswerError(
        f"{server.name}: meta_info has no specstore.sources; SGLang's Rust server, for one, does not send it"
    )


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token: joined they are the text of all. A character of several tokens is the last one's; special tokens have
    no text."""
    stream = DecodeStream(skip_special_tokens=True)
    return [stream.step(tokenizer, token) or "" for token in ids]


def _gone(server: Server, error: httpx.TransportError) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"{server.name}: the server at {server.url} cannot be reached; `make demo` shows its log"
    if isinstance(error, httpx.ReadTimeout):
        return f"{server.name}: the server has sent nothing for {SILENT_SECONDS:.0f} s"
    return f"{server.name}: the server broke its answer off; `make demo` shows its log"


def _refused(server: Server, response: httpx.Response) -> str:
    reason = " ".join(response.text.split())[:SHOWN_CHARACTERS]
    return f"{server.name}: the server answered with status {response.status_code}: {reason}"
