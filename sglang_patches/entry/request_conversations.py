"""The conversation of a request, by the name that its client gives a session anyway (`--specstore-request-conversation`).

Agents and chat applications name their sessions in headers and in fields of the body, for caches, routers and logs. The endpoints keep
few of these fields, so they are read from the HTTP request itself, as it was parsed. A session's name becomes a conversation's by way of
a digest: names can tell of persons, and a conversation's name reaches the datastore and what it shows to its operator.

Here are names of sessions alone. `user`, `safety_identifier` (`request_users`) and Anthropic's `metadata.user_id` name a person, whose
sessions would become one text; a response's `previous_response_id` is another in each request.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from datastore_service.protocol.names import MAX_NAME_BYTES, hashed_name
from sglang_patches.entry.request_wishes import give
from sglang_patches.options import load_options

if TYPE_CHECKING:
    from prometheus_client import Counter
    from sglang.srt.managers.io_struct import GenerateReqInput
    from starlette.requests import Request

HEADER, BODY = "header:", "body:"
# What `agents` in the option stands for, and who sends it.
AGENTS = {
    "header:x-claude-code-session-id": "Claude Code from 2.1.86",
    "header:x-session-id": "OpenCode, Crush",
    "header:x-session-affinity": "OpenCode, Crush, pi, nanobot",
    "header:session-id": "Codex",
    "header:session_id": "earlier Codex, pi",
    "header:x-openwebui-chat-id": "Open WebUI with `ENABLE_FORWARD_USER_INFO_HEADERS`",
    "body:prompt_cache_key": "Codex, Kimi Code, OpenAI's clients",
    "body:session_id": "SGLang's and OpenRouter's clients",
    "body:session_params.id": "SGLang's clients",
    "body:conversation_id": "SGLang's clients",
    "body:metadata.user_id.session_id": "Claude Code from 2.1.78",
}
UNUSABLE = "unusable"
MOST_NESTED = 1024  # characters of a string that may hold an object

_sources: tuple[str, ...] = ()  # of the option, in the process that answers requests


def enter(
    obj: GenerateReqInput, request: Request | None, wishes: Sequence[dict[str, Any]], tenants: Sequence[str]
) -> None:
    """Gives a call's requests the conversation of the session that its client names.

    wishes, tenants: of each request. One that names a conversation, or that is not to be remembered, gets none.
    """
    session = None if request is None else _session(request)
    if session is not None:
        names = [
            "" if _has_decided(wish) else hashed_name(tenant, session)
            for wish, tenant in zip(wishes, tenants, strict=True)
        ]
        give(obj, "conversation", names)


def _has_decided(wishes: dict[str, Any]) -> bool:
    return wishes.get("conversation") is not None or wishes.get("publish") is False


def _session(request: Request) -> str | None:
    """The first usable name of the operator's list. What is no name is passed over: no client has written it for us."""
    for source in _sources:
        value = read(request, source)
        if value is None or value == "":
            continue
        if isinstance(value, str) and len(value.encode(errors="surrogatepass")) <= MAX_NAME_BYTES:
            _counter().labels(source).inc()
            return value
        _counter().labels(UNUSABLE).inc()
    return None


def read(request: Request, source: str) -> object:
    """What a request has at a source of the operator's list; None if it has nothing there."""
    if source.startswith(HEADER):
        return _header(request, source.removeprefix(HEADER))
    value: object = getattr(request, "_json", None)  # Starlette keeps what an endpoint has read
    for name in source.removeprefix(BODY).split("."):
        value = _object(value).get(name)
    return value


def _header(request: Request, name: str) -> object:
    """The text of a header, of which Starlette makes a character a byte. All texts of one that is given several times."""
    values = [
        value.encode("latin-1").decode(errors="surrogateescape") for value in request.headers.getlist(name)
    ]
    return values[0] if len(values) == 1 else values or None


def _object(value: object) -> dict[str, Any]:
    """An object, or the one that a string holds; an empty one for anything else."""
    if isinstance(value, str) and value.startswith("{") and len(value) <= MOST_NESTED:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}


@functools.cache
def _counter() -> Counter:
    # Not above: the process that answers requests imports this module before SGLang has set up its metrics, which then would be lost.
    from prometheus_client import Counter

    return Counter(
        "specstore_request_conversations",
        "Calls whose client names a session, by where it does so",
        ["source"],
    )


def register() -> None:
    """For the process that answers requests."""
    global _sources
    given = load_options().conversation_sources
    _sources = tuple(source for word in given for source in (AGENTS if word == "agents" else (word,)))
