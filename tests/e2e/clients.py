"""Public client libraries as they are: each asks the same question, and names its session as its kind of client does."""

from __future__ import annotations

import json
from collections.abc import Mapping

import requests
from anthropic import Anthropic
from openai import OpenAI

from sglang_patches.launch.processes import PROXIES
from tests.support.servers.engine import Endpoint

TOKENS = 32
QUESTION = "Write one sentence about a lighthouse."  # whose answer repeats neither it nor itself
BEGINNING = "Long ago a lighthouse keeper lived alone on a small island. One night"
MESSAGES = [{"role": "user", "content": QUESTION}]


def openai(server: Endpoint, headers: Mapping[str, str]) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", default_headers=headers)


def openai_chat(server: Endpoint, session: str, headers: Mapping[str, str]) -> str:
    answer = openai(server, headers).chat.completions.create(
        model="m", messages=MESSAGES, prompt_cache_key=session, max_tokens=TOKENS, temperature=0
    )
    return answer.choices[0].message.content


def openai_completions(server: Endpoint, session: str, headers: Mapping[str, str]) -> str:
    """As an agent that sends a header."""
    answer = openai(server, {**headers, "session-id": session}).completions.create(
        model="m", prompt=BEGINNING, max_tokens=TOKENS, temperature=0
    )
    return answer.choices[0].text


def openai_responses(server: Endpoint, session: str, headers: Mapping[str, str]) -> str:
    client = openai(server, headers)
    (model,) = client.models.list().data  # this endpoint takes no other
    answer = client.responses.create(
        model=model.id, input=QUESTION, prompt_cache_key=session, max_output_tokens=TOKENS, temperature=0
    )
    return answer.output_text


def openai_stream(server: Endpoint, session: str, headers: Mapping[str, str]) -> str:
    chunks = openai(server, headers).chat.completions.create(
        model="m", messages=MESSAGES, prompt_cache_key=session, max_tokens=TOKENS, temperature=0, stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def anthropic(server: Endpoint, session: str, headers: Mapping[str, str]) -> str:
    """As Claude Code writes the field."""
    client = Anthropic(base_url=server.url, api_key="none", default_headers=headers)
    user = json.dumps({"device_id": "0" * 64, "account_uuid": "", "session_id": session})
    answer = client.messages.create(
        model="m",
        messages=MESSAGES,
        max_tokens=TOKENS,
        metadata={"user_id": user},
        extra_body={"temperature": 0},
    )
    return answer.content[0].text


def sglang(server: Endpoint, session: str, headers: Mapping[str, str]) -> str:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS}
    body = {"text": BEGINNING, "sampling_params": sampling, "conversation_id": session}
    answer = requests.post(f"{server.url}/generate", json=body, headers=headers, proxies=PROXIES, timeout=600)
    answer.raise_for_status()
    return answer.json()["text"]
