"""What reads an answer's text: reasoning and tool parsers, the detokenizer, and SGLang's other endpoints."""

from __future__ import annotations

import json
from typing import Any

import requests

from sglang_patches.launch.processes import PROXIES
from tests.conformance.request_cases.asking import NEW_TOKENS, Ask, Client, case

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Which two rivers are the longest?"}]


def _begun(piece: str) -> dict[str, Any]:
    """A chat whose assistant goes on as it began: what follows can be drafted."""
    asked = {"role": "user", "content": "Say this over and over:\n" + piece}
    return {"messages": [asked, {"role": "assistant", "content": piece * 4}], "continue_final_message": True}


def _deltas(events: list[dict[str, Any]], name: str) -> str:
    return "".join(choice["delta"].get(name) or "" for event in events for choice in event["choices"])


@case(demo=True)
def reasoning(client: Client) -> Any:
    """Marks of reasoning lie inside a piece of several tokens: what is thought, what is said and the counts are plain decoding's
    (vllm#55195, sglang#39826)."""
    told: dict[str, Any] = {}
    for name, piece in {
        "whole": "<think>two and two</think>It is four.\n",
        "ends first": "so be it</think>\n\nRed, as <think> roses.\n",
        "in lines": "let me see\n</think>\nHere.\n",
    }.items():
        body = {"model": "m", **_begun(piece), "temperature": 0, "max_tokens": 60}
        client.told(CHAT, body)
        whole = client.told(CHAT, body)
        choice, usage = whole["choices"][0], whole["usage"]
        events = client.events(CHAT, body | {"stream_options": {"include_usage": True}})
        thought = choice["message"].get("reasoning_content") or ""
        assert _deltas(events, "reasoning_content").strip() == thought.strip(), name
        assert _deltas(events, "content").strip() == (choice["message"]["content"] or "").strip(), name
        assert (
            events[-1]["usage"]["completion_tokens"]
            == usage["completion_tokens"]
            >= usage["reasoning_tokens"]
        ), name
        apart = client.told(CHAT, body | {"separate_reasoning": False})["choices"][0]["message"]["content"]
        streamed = [
            _deltas(events, "reasoning_content"),
            _deltas(events, "content"),
            events[-1]["usage"].get("reasoning_tokens"),
        ]
        told[name] = [choice["message"], choice["finish_reason"], usage["reasoning_tokens"], streamed, apart]
    return told


def _tool(name: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [
    _tool(
        "find_train",
        city={"type": "string", "enum": ["Basel", "Genoa"]},
        day={"type": "string", "enum": ["today", "tomorrow"]},
    ),
    _tool("multiply", left={"type": "integer", "maximum": 99}, right={"type": "integer", "maximum": 99}),
]
CALL = '<tool_call>\n{"name": "find_train", "arguments": {"city": "Basel", "day": "today"}}\n</tool_call>\n'


@case(demo=True)
def tool_calls(client: Client) -> Any:
    """Calls in a stream whose pieces have several tokens: each name once, the arguments whole (vllm#35421, vllm#55284)."""
    asked = {"messages": [{"role": "user", "content": "Find trains to Basel and to Genoa."}]}
    told: dict[str, Any] = {}
    for name, wish in {
        "required": asked | {"tool_choice": "required"},
        "named": asked | {"tool_choice": {"type": "function", "function": {"name": "multiply"}}},
        "one alone": asked | {"tool_choice": "required", "parallel_tool_calls": False},
        "none": asked | {"tool_choice": "none"},
        "begun": _begun(CALL),
    }.items():
        body = {"model": "m", "tools": TOOLS, "temperature": 0, "max_tokens": 90, **wish}
        choice = client.told(CHAT, body)["choices"][0]
        message = choice["message"]
        calls = [
            [call["function"]["name"], call["function"]["arguments"]]
            for call in message.get("tool_calls") or ()
        ]
        streamed, content = _streamed_calls(client.events(CHAT, body))
        if choice["finish_reason"] != "length":
            assert [[n, json.loads(a)] for n, a in streamed] == [[n, json.loads(a)] for n, a in calls], name
        told[name] = [calls, message["content"], choice["finish_reason"], streamed, content]
    return told


def _streamed_calls(events: list[dict[str, Any]]) -> tuple[list[list[str]], str]:
    """Names and arguments of calls, and the text beside them."""
    calls: dict[int, list[str]] = {}
    for delta in (choice["delta"] for event in events for choice in event["choices"]):
        for part in delta.get("tool_calls") or ():
            call = calls.setdefault(part["index"], ["", ""])
            call[0] += part["function"].get("name") or ""
            call[1] += part["function"].get("arguments") or ""
    return [calls[index] for index in sorted(calls)], _deltas(events, "content")


SCRIPTS = (
    "😀🎉 日本語 中文 한국어 naïve — “so” 👩‍👩‍👧 " * 5,
    "白日依山盡，黃河入海流。" * 8,
    "b 世b 界 ñ ö 👍🏽 " * 8,
)


@case(demo=True)
def characters_of_several_tokens(client: Client) -> Any:
    """A character that a run or a cap cuts shows once it is whole, and no piece shows it twice (sglang#31598)."""
    told: dict[str, Any] = {}
    asks: dict[str, Ask] = {}
    for number, prompt in enumerate(SCRIPTS):
        ids = client.told("/tokenize", {"model": "m", "prompt": prompt})["tokens"]
        text = client.learned(ids, ignore_eos=True)["text"]
        *_, last = client.stream(ids, temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        assert last["text"] == text
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        assert (
            "".join(c["text"] for event in client.events("/v1/completions", body) for c in event["choices"])
            == text
        )
        told[str(number)] = text
        stops = [stop for stop in dict.fromkeys(text[1:14:2]) if stop != "\ufffd"]
        asks |= {f"{number} stop {stop}": (ids, {"ignore_eos": True, "stop": [stop]}) for stop in stops}
        asks |= {
            f"{number} cap {cap}": (ids, {"ignore_eos": True, "max_new_tokens": cap}) for cap in range(1, 9)
        }
    return told | client.briefs(asks)


DOORS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/score",
        {
            "query": "The grass is",
            "items": [" green", " blue", ""],
            "label_token_ids": [30, 31, 504],
            "apply_softmax": True,
        },
    ),
    (
        "/v1/score",
        {"query": "The grass is", "items": [" green"], "label_token_ids": [30], "item_first": True},
    ),
    ("/v1/responses", {"input": ASKED[0]["content"], "temperature": 0, "max_output_tokens": 24}),
    ("/v1/messages", {"messages": ASKED, "temperature": 0, "max_tokens": 24}),
    ("/v1/messages", {"messages": ASKED, "temperature": 0, "max_tokens": 24, "stop_sequences": ["e"]}),
    ("/v1/messages/count_tokens", {"messages": ASKED}),
    (
        "/api/generate",
        {"prompt": ASKED[0]["content"], "stream": False, "options": {"temperature": 0, "num_predict": 24}},
    ),
    ("/api/chat", {"messages": ASKED, "stream": False, "options": {"temperature": 0, "num_predict": 24}}),
    ("/invocations", {"messages": ASKED, "temperature": 0, "max_tokens": 12}),
    (
        "/vertex_generate",
        {
            "instances": [{"text": "So"}],
            "parameters": {"sampling_params": {"temperature": 0, "max_new_tokens": 6}},
        },
    ),
    ("/v1/completions", {"prompt": "So", "best_of": 3, "temperature": 0, "max_tokens": 4}),
    ("/v1/embeddings", {"input": "x"}),
    ("/encode", {"text": "x"}),
    ("/classify", {"text": "x"}),
    ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
]
# Of an answer, wherever it stands in it.
KEPT = {
    "text",
    "content",
    "response",
    "scores",
    "finish_reason",
    "stop_reason",
    "stop_sequence",
    "done_reason",
    "eval_count",
}
KEPT |= {"output_tokens", "completion_tokens"}
LOOKS = ("health_generate", "model_info", "get_load", "v1/loads", "v1/models", "ping")


@case(demo=True)
def other_endpoints(client: Client) -> Any:
    """Scores, responses, messages, Ollama's and the clouds' endpoints answer or refuse as plain decoding's."""
    told: list[Any] = []
    for path, body in DOORS:
        response = client.post(path, {"model": "m", **body})
        told.append([path, response.status_code, _kept(response.json()) if response.ok else None])
    told += [requests.get(f"{client.url}/{path}", proxies=PROXIES, timeout=60).status_code for path in LOOKS]
    body = {"model": "m", "messages": ASKED, "temperature": 0, "max_tokens": 24}
    events = client.events("/v1/messages", body)
    text = "".join(event.get("delta", {}).get("text", "") for event in events)
    usage = [event["usage"]["output_tokens"] for event in events if event["type"] == "message_delta"]
    return [*told, text, usage]


def _kept(answer: Any) -> Any:
    """Without names, times, what tells of a cache or of speculation, and what is the server's own."""
    if isinstance(answer, list):
        return [_kept(one) for one in answer]
    if not isinstance(answer, dict):
        return None
    inner = {
        key: _kept(value)
        for key, value in answer.items()
        if isinstance(value, (dict, list)) and key != "scores" and not key.startswith("spec")
    }
    return {key: value for key, value in inner.items() if value} | {
        key: answer[key]
        for key in answer.keys() & KEPT
        if not isinstance(answer[key], (dict, list)) or key == "scores"
    }
