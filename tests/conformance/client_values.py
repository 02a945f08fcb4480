"""Requests with one odd value: every field that a client writes, of every length, type and sign."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput, OpenSessionReqInput, SessionParams
from sglang.srt.sampling.sampling_params import SamplingParams

LENGTHS = (0, 1, 255, 256, 257, 300, 10**5)
CHARACTERS = ("x", "ü", "\x00", "\x1b", "\u202e", "\n", '"', "\U0001f600", "\ud800")
WHOLE = (0, 1, -1, -2, 2, 7, 300, 60000, 2**31, -(2**31), 2**63 - 1, -(2**63), 2**64)
NUMBERS = (*WHOLE, 0.5, -0.5, 3e38, 1e308, 1e-300, float("nan"), float("inf"))
CONSTANTS = (None, True, False)
# Of these a large number is no fault but a large order.
ORDERS = {"n", "beam_width", "best_of", "max_new_tokens", "max_tokens", "max_completion_tokens"}


SESSION = "s"  # that is open


class Odd(NamedTuple):
    """What is posted where; `shown` says in short what is odd."""

    path: str
    body: dict[str, Any]
    shown: str


def _names(kind: type) -> list[str]:
    return [name for name in inspect.signature(kind).parameters if name not in ORDERS]


GENERATE = [field.name for field in dataclasses.fields(GenerateReqInput)]
PATHS = {
    "/v1/completions": [name for name in CompletionRequest.model_fields if name not in ORDERS],
    "/v1/chat/completions": [name for name in ChatCompletionRequest.model_fields if name not in ORDERS],
    "/open_session": _names(OpenSessionReqInput),
}
WISHES = ("conversation", "draft", "nodes", "publish", "reference", "sources", "tenant")


def odd_requests(seed: int, ids: list[int]) -> Iterator[Odd]:
    """Without end. The first opens the session that others name. ids: a prompt."""
    rng = random.Random(seed)
    yield Odd("/open_session", {"capacity_of_str_len": 100, "session_id": SESSION}, "a session")
    while True:
        yield _request(rng, ids)


def _request(rng: random.Random, ids: list[int]) -> Odd:
    value = _value(rng, depth=2)
    # A field may matter to some requests alone.
    sampling: dict[str, Any] = {"max_new_tokens": 4} | rng.choice(({"temperature": 0}, {"top_p": 0.9}))
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling}
    body |= rng.choice(({}, {"return_logprob": True}))
    kind = rng.choice(("field", "sampling", "session", "wish", *PATHS))
    if kind in PATHS:
        name = rng.choice(PATHS[kind])
        return Odd(kind, _openai(kind) | {name: value}, f"{kind} {name}={value!r:.60}")
    if kind == "field":
        name = rng.choice(GENERATE)
        if name in ("text", "input_embeds"):
            del body["input_ids"]
        body[name] = value
    elif kind == "sampling":
        name = rng.choice(_names(SamplingParams))
        sampling[name] = value
    elif kind == "session":
        name = rng.choice(_names(SessionParams))
        body["session_params"] = {"id": SESSION, name: value}
    else:
        name = rng.choice(WISHES)
        sampling["custom_params"] = {"specstore": {name: value}}
    return Odd("/generate", body, f"{kind} {name}={value!r:.60}")


def _openai(path: str) -> dict[str, Any]:
    if path == "/open_session":
        return {"capacity_of_str_len": 100}
    prompt = (
        {"prompt": [5, 6, 7]}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "ab"}]}
    )
    return prompt | {"model": "m", "max_tokens": 4, "temperature": 0}


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(
        ("text", "number", "constant", "list", "object") if depth else ("text", "number", "constant")
    )
    if kind == "text":
        return rng.choice(CHARACTERS) * rng.choice(LENGTHS)
    if kind == "number":
        return rng.choice(NUMBERS)
    if kind == "constant":
        return rng.choice(CONSTANTS)
    items = [_value(rng, depth - 1) for _ in range(rng.choice((0, 1, 2)))]
    if kind == "list":
        return items
    keys = ("id", "a", "1", "99999", "type", "")
    return {rng.choice(keys): item for item in items}
