"""OpenAI's `prediction` of a chat completion: the text that the answer is expected to be, or nearly.

SGLang's own request has no such field and drops it. Here it becomes the first of the request's references, and the answer's usage says how
many of its tokens were accepted. All other requests are answered as without this module.
"""

from __future__ import annotations

import copy
import json
import reprlib
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.plugins.hook_registry import HookType
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from sglang_patches.entry.references import MOST_BYTES, size_of
from sglang_patches.entry.request_wishes import refuse_unless_permitted
from sglang_patches.host import hooks
from sglang_patches.ledger.usage import PREDICTION, SUMMARY

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A part of a prediction's content."""

    text: str


class Prediction(msgspec.Struct, tag_field="type", tag="content"):
    """The field, as OpenAI has it."""

    content: str | list[TextPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


async def _around_chat(
    original: Callable,
    serving: OpenAIServingChat,
    request: ChatCompletionRequest,
    raw_request: Request | None = None,
) -> object:
    """Called for each chat completion."""
    given = None
    if isinstance(raw_request, Request):  # SGLang's gRPC bridge has none
        given = (await raw_request.json()).get("prediction")  # read before, and kept
    if given is None:
        return await original(serving, request, raw_request)
    try:
        refuse_unless_permitted("reference", "prediction")
        request.custom_params = _expecting(request.custom_params, predicted_text(given))
    except ValueError as error:
        return serving.create_error_response(str(error), "BadRequest", param="prediction")
    counting = copy.copy(serving)
    counting.tokenizer_manager = manager = _Counting(serving.tokenizer_manager)
    return _told(await original(counting, request, raw_request), manager.counts)


def predicted_text(given: object) -> str:
    """The text of a prediction. Raises ValueError that names the field, and the limit for too many bytes."""
    try:
        text = msgspec.convert(given, Prediction).text
    except msgspec.ValidationError as error:
        raise ValueError(f"prediction: {error}") from None
    if size_of(text) > MOST_BYTES:
        raise ValueError(f"prediction: {size_of(text)} bytes exceed {MOST_BYTES}")
    return text


def _expecting(custom: dict[str, Any] | None, text: str) -> dict[str, Any]:
    """These `custom_params` with the text as the first reference."""
    wishes = (custom or {}).get("specstore") or {}
    if not isinstance(wishes, dict):
        raise ValueError(f"custom_params.specstore: {reprlib.repr(wishes)} is not an object")
    others = wishes.get("reference") or []
    texts = [text, *(others if isinstance(others, list) else [others])]
    return (custom or {}) | {"specstore": wishes | {"reference": texts}}


class _Counting:
    """A tokenizer manager that adds up what its answers say of their predictions."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self.counts = {"accepted": 0, "rejected": 0}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, *request: Any) -> AsyncIterator[Any]:
        async for message in self._manager.generate_request(*request):
            for answer in message if isinstance(message, list) else [message]:
                for name, count in answer["meta_info"].get(SUMMARY, {}).get(PREDICTION, {}).items():
                    self.counts[name] += count
            yield message


def _told(answer: Any, counts: dict[str, int]) -> Response:
    """The answer with the counts in its usage. SGLang's own types have no fields for them. An error is as it was."""
    if isinstance(answer, StreamingResponse):
        answer.body_iterator = _chunks(answer.body_iterator, counts)
    if isinstance(answer, Response):
        return answer
    body = json.loads(answer.model_dump_json(by_alias=True))
    return JSONResponse(_with_counts(body, counts))


async def _chunks(chunks: AsyncIterable[Any], counts: dict[str, int]) -> AsyncIterator[Any]:
    """The chunk that has the whole answer's usage has no choices."""
    async for chunk in chunks:
        if isinstance(chunk, str) and '"choices":[]' in chunk:
            body = json.loads(chunk.removeprefix("data: "))
            if body.get("usage"):
                chunk = f"data: {json.dumps(_with_counts(body, counts))}\n\n"
        yield chunk


def _with_counts(body: dict[str, Any], counts: dict[str, int]) -> dict[str, Any]:
    details = body["usage"].get("completion_tokens_details") or {}
    told = {f"{name}_prediction_tokens": count for name, count in counts.items()}
    return body | {"usage": body["usage"] | {"completion_tokens_details": details | told}}


_CHAT = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat.handle_request"
HOOKS: hooks.ByKind = {HookType.AROUND: {_CHAT: _around_chat}}


def register() -> None:
    """For the process that answers requests."""
    hooks.apply(HOOKS)
