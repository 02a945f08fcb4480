"""A stand-in of an SGLang server for the tests of the demo's page: `/tokenize` and `/generate` as the page server uses them.

It knows no model: it streams the tokens that a test gives it, as SGLang's messages have them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sglang_patches.launch.processes import free_port

END = "<|end|>"


def byte_tokenizer() -> Tokenizer:
    """Each byte is a token, and so are " the" and END."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


@dataclass
class StandIn:
    """What the next answers are. per_step: tokens of a message. sources: None as of a server without the plugin. seconds: before each
    message. context: tokens of prompt and answer at most. breaks_after: messages, after which the connection is dropped; None:
    never. asked: the bodies of /generate. ended_early: answers whose reader went away."""

    tokenizer: Tokenizer
    output: Sequence[int]
    per_step: int = 1
    sources: Sequence[str] | None = None
    seconds: float = 0.0
    context: int = 4096
    breaks_after: int | None = None
    reply: Response | None = None  # to /generate instead of an answer
    asked: list[dict[str, Any]] = field(default_factory=list)
    ended_early: int = 0

    def application(self) -> Starlette:
        routes = [Route("/tokenize", self._tokenize, methods=["POST"])]
        return Starlette(routes=[*routes, Route("/generate", self._generate, methods=["POST"])])

    async def _tokenize(self, request: Request) -> Response:
        (message,) = (await request.json())["messages"]
        ids = self.tokenizer.encode(message["content"]).ids
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.context})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        if self.reply is not None:
            return self.reply
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        try:
            async for message in self._messages(body):
                yield b"data: " + json.dumps(message, ensure_ascii=False).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.ended_early += 1
            raise

    async def _messages(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        count, limit = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        if count + limit > self.context:
            words = (
                f"Requested token count exceeds the model's maximum context length of {self.context} tokens."
            )
            yield {"error": {"message": words, "type": "invalid_request_error", "code": 400}}
            return
        output = list(self.output[:limit])
        ends = [*range(1, len(output), self.per_step), len(output)]
        for sent, end in enumerate(ends):
            if sent == self.breaks_after:
                raise ConnectionError("the stand-in breaks off")
            await asyncio.sleep(self.seconds)
            yield self._message(output[:end], len(ends) - 1 if end == len(output) else None)

    def _message(self, output: list[int], steps: int | None) -> dict[str, Any]:
        """steps: of the last message."""
        info: dict[str, Any] = {"completion_tokens": len(output), "finish_reason": None}
        if steps is not None:
            cut = len(output) < len(self.output)
            info["finish_reason"] = {"type": "length" if cut else "stop"}
            if self.sources is not None:
                info["specstore"] = {"steps": steps, "sources": list(self.sources[: len(output)])}
        return {"text": self.tokenizer.decode(output), "output_ids": output, "meta_info": info}


@contextlib.contextmanager
def serving(application: Starlette) -> Iterator[str]:
    """Its base address on loopback, for the duration of the block."""
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(
            application, host="127.0.0.1", port=port, log_level="critical", timeout_graceful_shutdown=1
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            thread.join(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
