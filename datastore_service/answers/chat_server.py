"""Asks a running SGLang server over HTTP.

The endpoint is SGLang's `/v1/chat/completions`: the server applies the model's chat template, so the client needs
neither the template nor the tokenizer. SGLang 0.5.23 adds the exact output ids to the answer when the request has
`return_token_ids` (`response_token_ids` of a choice in its `entrypoints/openai/protocol.py`). A server that does not
know the field ignores it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from datastore_service.answers.errors import ModelServerError
from datastore_service.answers.prompts import Prompt

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 600.0  # without a byte
RETRY_SECONDS = (1.0, 2.0, 4.0)  # before each further try
PASSING = frozenset({408, 425, 429})  # statuses that another try may not get; so are all of 500 and above
SHOWN_CHARACTERS = 300  # of a server's reason


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer to one prompt.

    tokens: the exact ids of the output, None if the server does not tell them."""

    text: str
    tokens: list[int] | None


class _PassingError(Exception):
    """What another try may mend."""


class ChatServer:
    """One server, to be entered. url: http://HOST:PORT. key: its API key, "" for none. connections: most at once.

    Raises ValueError for a url of another form."""

    def __init__(self, url: str, key: str = "", connections: int = 1) -> None:
        self.url = _checked_url(url)
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=connections),
            trust_env=False,  # no proxy of the environment reads prompts and answers
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def check(self) -> None:
        """Raises ModelServerError if the server cannot be reached or does not list its models."""
        try:
            response = await self._client.get("/v1/models")
        except httpx.TransportError as error:
            raise ModelServerError(f"server: {self.url}: cannot be reached: {_words(error)}") from error
        if response.is_error:
            raise ModelServerError(f"server: {self.url}: {_status(response)}")

    async def answer(self, prompt: Prompt, temperature: float, max_tokens: int) -> Answer:
        """The model's answer to a conversation of one turn. temperature: 0 for greedy.

        Raises ModelServerError for a prompt that the server refuses, and after as many failed tries as RETRY_SECONDS
        allows."""
        body = _request(prompt.text, temperature, max_tokens)
        for seconds in (*RETRY_SECONDS, None):
            try:
                return await self._try(prompt, body)
            except _PassingError as error:
                if seconds is None:
                    tries = len(RETRY_SECONDS) + 1
                    raise ModelServerError(
                        f"server: {self.url}: no answer in {tries} tries: {error}"
                    ) from error
                await asyncio.sleep(seconds)
        raise AssertionError("the last try returns or raises")

    async def _try(self, prompt: Prompt, body: dict[str, Any]) -> Answer:
        try:
            response = await self._client.post("/v1/chat/completions", json=body)
        except httpx.TransportError as error:
            raise _PassingError(_words(error)) from error
        if response.is_server_error or response.status_code in PASSING:
            raise _PassingError(_status(response))
        if not response.is_success:
            raise ModelServerError(f"{prompt.place}: refused by {self.url}: {_status(response)}")
        return self._read(response)

    def _read(self, response: httpx.Response) -> Answer:
        try:
            reply = response.json()
        except ValueError:
            raise ModelServerError(f"server: {self.url}: its answer is not JSON") from None
        match reply:
            case {"choices": [{"finish_reason": "abort"}, *_]}:
                raise _PassingError("the server broke off the answer")
            case {"choices": [{"message": {"content": str(text)}} as choice, *_]}:
                return Answer(text, self._ids(choice.get("response_token_ids")))
        raise ModelServerError(f"server: {self.url}: its answer has no text in choices[0].message.content")

    def _ids(self, ids: object) -> list[int] | None:
        if ids is None or (isinstance(ids, list) and all(type(token) is int for token in ids)):
            return ids
        raise ModelServerError(f"server: {self.url}: response_token_ids: not a list of token ids")


def _request(text: str, temperature: float, max_tokens: int) -> dict[str, Any]:
    """The body of a chat request of one turn. `separate_reasoning` is false: what the model thinks is part of its text, as it is of
    its tokens. `publish` is false: a server with the plugin keeps the answer out of its live tier."""
    return {
        "model": "default",
        "messages": [{"role": "user", "content": text}],
        "temperature": temperature,
        "max_tokens": max_tokens,
        "return_token_ids": True,
        "separate_reasoning": False,
        "custom_params": {"specstore": {"publish": False}},
    }


def _checked_url(text: str) -> str:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"server: {text!r} is not http://HOST:PORT")
    return text.rstrip("/")


def _words(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__


def _status(response: httpx.Response) -> str:
    """The status and the server's reason, in one line."""
    reason = " ".join(_reason(response).split())[:SHOWN_CHARACTERS]
    return f"{response.status_code}: {reason or response.reason_phrase}"


def _reason(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return response.text
    match body:
        case {"message": str(reason)} | {"error": str(reason)} | {"error": {"message": str(reason)}}:
            return reason
    return response.text
