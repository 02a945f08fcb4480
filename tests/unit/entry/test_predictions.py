"""OpenAI's `prediction` around SGLang's answer to a chat completion."""

import asyncio
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from sglang.srt.entrypoints.openai.protocol import (  # noqa: E402
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
    UsageInfo,
)
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import StreamingResponse  # noqa: E402

from sglang_patches.entry.predictions import _around_chat, predicted_text  # noqa: E402
from sglang_patches.entry.references import MOST_BYTES  # noqa: E402

CONTENT = {"type": "content", "content": "expected"}
COUNTS = {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 3}
USAGE = UsageInfo(prompt_tokens=1, completion_tokens=20, total_tokens=21)


class Manager:
    """Says of two answers what their predictions brought."""

    async def generate_request(self, *_: object):
        yield {"meta_info": {}}
        yield [
            {"meta_info": {"specstore": {"prediction": {"accepted": 4, "rejected": 3}}}},
            {"meta_info": {"specstore": {"prediction": {"accepted": 3, "rejected": 0}}}},
        ]


class Serving:
    create_error_response = OpenAIServingChat.create_error_response

    def __init__(self) -> None:
        self.tokenizer_manager = Manager()


async def whole(serving: Serving, request: ChatCompletionRequest, raw_request: object) -> object:
    async for _ in serving.tokenizer_manager.generate_request():
        pass
    return ChatCompletionResponse(id="i", model="m", choices=[], usage=USAGE)


async def streamed(serving: Serving, request: ChatCompletionRequest, raw_request: object) -> object:
    async def chunks():
        text = '"choices":[] "usage":{'
        yield f"data: {json.dumps({'choices': [{'delta': {'content': text}}], 'usage': None})}\n\n"
        async for _ in serving.tokenizer_manager.generate_request():
            pass
        for usage in (None, USAGE):
            chunk = ChatCompletionStreamResponse(id="i", model="m", choices=[], usage=usage)
            yield f"data: {chunk.model_dump_json()}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(chunks())


def asked(original, prediction: object = None, **fields: object):
    """The answer, and the request as SGLang got it. fields: of the request."""
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    request = ChatCompletionRequest(**body)

    async def receive() -> dict:
        sent = body if prediction is None else body | {"prediction": prediction}
        return {"type": "http.request", "body": json.dumps(sent).encode()}

    raw = Request({"type": "http", "headers": []}, receive)
    return asyncio.run(_read(original, request, raw)), request


async def _read(original, request: ChatCompletionRequest, raw: object) -> object:
    answer = await _around_chat(original, Serving(), request, raw)
    if isinstance(answer, StreamingResponse):
        return [chunk async for chunk in answer.body_iterator]
    return answer


def reference(request: ChatCompletionRequest) -> object:
    return (request.custom_params or {}).get("specstore", {}).get("reference")


@pytest.mark.parametrize(
    "content",
    ["expected", [{"type": "text", "text": "expect"}, {"type": "text", "text": "ed"}]],
    ids=["a string", "parts"],
)
def test_its_text_is_the_first_reference(content):
    prediction = {"type": "content", "content": content}
    assert reference(asked(whole, prediction)[1]) == ["expected"]
    for given in ("a file", ["a file"]):
        custom = {"other": 1, "specstore": {"reference": given, "publish": False}}
        _, request = asked(whole, prediction, custom_params=custom)
        assert request.custom_params == {
            "other": 1,
            "specstore": {"reference": ["expected", "a file"], "publish": False},
        }


def test_the_usage_says_what_was_accepted():
    answer, _ = asked(whole, CONTENT)
    body = json.loads(answer.body)
    assert body["usage"].pop("completion_tokens_details") == COUNTS
    expected = ChatCompletionResponse(id="i", model="m", choices=[], usage=USAGE, created=body["created"])
    of_usage = json.loads(expected.model_dump_json(by_alias=True))
    of_usage["usage"].pop("completion_tokens_details")
    assert body == of_usage and answer.status_code == 200


def test_other_details_of_the_usage_stay():
    async def reasoning(*arguments: object) -> object:
        answer = await whole(*arguments)
        return answer.model_copy(
            update={"usage": UsageInfo(completion_tokens_details={"reasoning_tokens": 5})}
        )

    details = json.loads(asked(reasoning, CONTENT)[0].body)["usage"]["completion_tokens_details"]
    assert details == COUNTS | {"reasoning_tokens": 5}


def test_the_last_usage_of_a_stream_says_it():
    (text, others, usage, done), _ = asked(streamed, CONTENT)
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens_details"] == COUNTS
    plain = asked(streamed)[0]
    assert text == plain[0] and done == plain[3]
    assert "prediction" not in others


def test_a_request_without_one_is_not_touched():
    answer, request = asked(whole)
    assert isinstance(answer, ChatCompletionResponse) and request.custom_params is None
    answer = asyncio.run(_around_chat(whole, Serving(), request, SimpleNamespace()))
    assert isinstance(answer, ChatCompletionResponse)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("expected", "prediction: Expected `object`, got `str`"),
        ({"type": "content"}, "prediction: Object missing required field `content`"),
        ({"type": "other", "content": "a"}, r"prediction: Invalid value 'other' - at `\$.type`"),
        ({"type": "content", "content": 7}, r"prediction: Expected `str \| array`, got `int` - at `\$.content`"),
        ({"type": "content", "content": [{"type": "image"}]}, "prediction: Invalid value 'image'"),
        ({"type": "content", "content": "é" * MOST_BYTES}, f"prediction: {2 * MOST_BYTES} bytes exceed {MOST_BYTES}"),
    ],
)  # fmt: skip
def test_what_is_none_is_refused_by_name(given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        predicted_text(given)
    answer, _ = asked(whole, given)
    refused = json.loads(answer.body)
    assert answer.status_code == refused["code"] == 400 and refused["message"].startswith("prediction: ")
