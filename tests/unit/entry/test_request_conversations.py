"""The conversation of a request, by its session's name, through SGLang's HTTP endpoints and their request classes."""

import contextlib
import functools
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from fastapi.testclient import TestClient  # noqa: E402
from prometheus_client import REGISTRY  # noqa: E402
from sglang.srt.entrypoints import http_server  # noqa: E402
from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: E402
from sglang.srt.managers.tokenizer_manager import TokenizerManager  # noqa: E402

from datastore_service.protocol.names import hashed_name  # noqa: E402
from datastore_service.protocol.types import Opening  # noqa: E402
from sglang_patches.entry import request_hook  # noqa: E402
from sglang_patches.entry.request_conversations import AGENTS, MAX_NAME_BYTES, UNUSABLE  # noqa: E402
from sglang_patches.entry.request_wishes import wishes_of  # noqa: E402
from sglang_patches.ledger.requests import request_opening  # noqa: E402
from sglang_patches.options import Options  # noqa: E402
from tests.tenant_names import PAIRS  # noqa: E402
from tests.unit.entry.conftest import manager  # noqa: E402

TENANT = "x-tenant"
MESSAGES = {"messages": [{"role": "user", "content": "a question"}]}
ENDPOINTS = {
    "/v1/chat/completions": MESSAGES,
    "/v1/completions": {"prompt": "a question"},
    "/v1/responses": {"input": "a question"},
    "/v1/messages": MESSAGES | {"max_tokens": 8},
    "/generate": {"text": "a question"},
}
JSON = [("content-type", "application/json")]
SESSION = "0f1e-d2c3"


class RefusedError(Exception):
    """Of a call that is not answered."""


class Endpoints:
    """SGLang's own, with its parsing and its classes. What makes a request of SGLang's from one of theirs needs a model, and is left out:
    there `tests/e2e/test_conversations.py` looks. samplings: of the requests that have entered."""

    def __init__(self) -> None:
        self.samplings: list[dict] = []
        self.handle_request = self.create_responses = self.handle_messages = self._handle

    async def _handle(self, request: object, raw_request: object) -> dict:
        self._enter(GenerateReqInput(text="a question"), raw_request)
        return {}

    async def generate_request(self, obj: GenerateReqInput, request: object):
        self._enter(obj, request)
        yield {}

    def _enter(self, obj: GenerateReqInput, request: object) -> None:
        obj.normalize_batch_and_arguments()
        TokenizerManager._init_req_state(manager(), obj, request)
        self.samplings += [obj.sampling_params] if obj.is_single else obj.sampling_params


@pytest.fixture
def enter(monkeypatch):
    """Posts to an endpoint; returns the openings of what has entered, as the scheduler reads them."""
    endpoints = Endpoints()
    for api in ("chat", "completion", "responses"):
        monkeypatch.setattr(http_server.app.state, f"openai_serving_{api}", endpoints, raising=False)
    monkeypatch.setattr(http_server.app.state, "anthropic_serving", endpoints, raising=False)
    monkeypatch.setattr(http_server, "_global_state", SimpleNamespace(tokenizer_manager=endpoints))
    client = TestClient(http_server.app)

    def post(path: str, body: dict | None = None, headers: object = None) -> list[Opening]:
        endpoints.samplings.clear()
        fields = {"model": "m"} if path.startswith("/v1") else {}
        text = json.dumps(fields | ENDPOINTS[path] | (body or {}))
        answer = client.post(path, content=text, headers=[*JSON, *_pairs(headers)])
        if answer.status_code != 200:
            raise RefusedError(answer.text)
        return list(map(opening, endpoints.samplings))

    return post


@pytest.fixture
def call(enter):
    """The same, for the conversations."""
    return lambda *given, **named: [opening.conversation for opening in enter(*given, **named)]


def _pairs(headers: object) -> list:
    return list((headers.items() if isinstance(headers, dict) else headers) or ())


def opening(sampling: dict) -> Opening:
    params = SimpleNamespace(custom_params=sampling.get("custom_params"))
    return request_opening(SimpleNamespace(sampling_params=params, origin_input_ids=[1]), True)


@pytest.fixture
def generate(call):
    """The conversation of the one request of a call of /generate."""

    def ask(body: dict | None = None, headers: object = None) -> str:
        (found,) = call("/generate", body, headers)
        return found

    return ask


def body_of(source: str, value: object) -> dict:
    """A body with this field. Claude Code writes an object into a string."""
    *path, last = source.removeprefix("body:").split(".")
    inner = json.dumps({"device_id": "d", last: value}) if path[-1:] == ["user_id"] else {last: value}
    return functools.reduce(lambda held, name: {name: held}, reversed(path), inner) if path else inner


def sent_as(source: str, value: str) -> dict:
    """The arguments of a call whose client names its session so."""
    if source.startswith("header:"):
        return {"headers": {source.removeprefix("header:"): value}}
    return {"body": body_of(source, value)}


@pytest.mark.parametrize("source", AGENTS)
def test_every_name_of_a_session_is_found_at_every_endpoint(answering, call, source):
    answering()
    for path in ENDPOINTS:
        assert call(path, **sent_as(source, SESSION)) == [hashed_name("", SESSION)]
        assert call(path) == [""]


@pytest.mark.parametrize(
    "body",
    [{"user": "ada"}, {"safety_identifier": "ada"}, {"metadata": {"user_id": "ada"}}, {"metadata": {"user_id": '{"device_id": "d"}'}}],
    ids=str,
)  # fmt: skip
def test_the_name_of_a_person_is_none_of_a_session(answering, call, body):
    answering()
    for path in ENDPOINTS:
        assert call(path, body) == [""]


@pytest.mark.parametrize("source", AGENTS)
def test_two_sessions_are_two_conversations_and_one_is_one(answering, generate, source):
    answering()
    one, again, other = (generate(**sent_as(source, name)) for name in ("a", "a", "b"))
    assert one == again != other != ""


def test_the_first_name_of_the_list_counts(answering, generate):
    headers = {"X-Session-Id": "one", "x-mine": "two"}
    body = {"prompt_cache_key": "three", "conversation_id": "four"}
    for option, session in [
        ("agents", "one"),
        ("header:x-mine,agents", "two"),
        ("body:prompt_cache_key,header:x-session-id", "three"),
        ("header:X-MINE", "two"),
        ("header:x-other,body:user,body:conversation_id", "four"),
    ]:
        answering(conversation=option)
        assert generate(body, headers) == hashed_name("", session)
    answering(conversation="off")
    assert generate(body, headers) == ""


def test_a_conversation_that_a_request_names_stays(answering, generate):
    answering()
    headers = {"x-session-id": SESSION}

    def saying(**wishes: object) -> str:
        return generate({"sampling_params": {"custom_params": {"specstore": wishes}}}, headers)

    assert saying(conversation="talk") == "talk"
    assert saying(conversation="") == ""
    assert saying(conversation=None, sources=True) == hashed_name("", SESSION)


def test_what_is_not_to_be_remembered_joins_no_conversation(answering, generate):
    answering()
    wishes = {"sampling_params": {"custom_params": {"specstore": {"publish": False}}}}
    assert generate(wishes, {"x-session-id": SESSION}) == ""


def test_what_a_request_asks_for_besides_stays(answering, call, generate):
    answering(tenant=f"header:{TENANT}")
    custom = {"other": 1, "specstore": {"nodes": 3}}
    sampling = {"temperature": 0.5, "custom_params": custom}
    body = {"text": ["one", "two"], "sampling_params": sampling, "session_id": SESSION}
    assert call("/generate", body, {TENANT: "acme"}) == [hashed_name("acme", SESSION)] * 2


@pytest.mark.parametrize("pair", PAIRS)
def test_the_same_session_of_two_tenants_is_two_conversations(answering, generate, pair):
    answering(tenant=f"header:{TENANT}")
    one, other = (
        generate({"prompt_cache_key": SESSION}, {TENANT: tenant.encode()}) for tenant in PAIRS[pair]
    )
    assert one != other != ""


def test_no_name_appears_in_what_goes_on(answering, call, generate):
    answering()
    found = generate({"prompt_cache_key": "ada@example.org"})
    assert len(found) == 64 and "ada" not in found


USELESS = [
    "x" * (MAX_NAME_BYTES + 1),
    "ü" * MAX_NAME_BYTES,
    "",
    None,
    7,
    1.5,
    True,
    [],
    ["a"],
    {},
    {"id": "a"},
]


@pytest.mark.parametrize("source", [source for source in AGENTS if source.startswith("body:")])
def test_what_is_no_name_is_passed_over(answering, call, source):
    """And refused where stock SGLang refuses it: some fields are its own."""

    def answered(option: str) -> dict:
        answering(conversation=option)
        found = {}
        for path, value in itertools.product(ENDPOINTS, USELESS):
            with contextlib.suppress(RefusedError):
                found[path, repr(value)] = call(path, body_of(source, value), {"x-next": SESSION})
        return found

    stock, ours = answered("off"), answered(f"{source},header:x-next")
    assert len(stock) >= len(ENDPOINTS) * 4 and set(map(tuple, stock.values())) == {("",)}
    assert ours == dict.fromkeys(stock, [hashed_name("", SESSION)])


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"session_id": 7}', '{"session_id": ["a"]}', "[" * 900, '{"a":' * 200, "{" + " " * 2000 + "}"]
)  # fmt: skip
def test_a_string_that_holds_no_session_is_passed_over(answering, generate, text):
    answering()
    assert generate({"metadata": {"user_id": text}}) == ""


def test_a_name_that_is_not_unicode_is_one(answering, generate):
    answering()
    half, other = (generate({"metadata": {"user_id": f'{{"session_id": "\\ud80{i}"}}'}}) for i in "01")
    assert half != other != ""


def test_a_header_that_is_no_name_is_passed_over(answering, generate):
    answering()
    twice = [("x-session-id", "mine"), ("x-session-id", "the gateway's")]
    assert generate(headers=twice) == ""
    assert generate({"prompt_cache_key": "key"}, twice) == hashed_name("", "key")
    assert generate(headers={"x-session-id": "x" * (MAX_NAME_BYTES + 1)}) == ""
    assert generate(headers={"x-session-id": ""}) == ""
    assert generate(headers={"x-session-id": b"\xff"}) not in (
        "",
        generate(headers={"x-session-id": b"\xfe"}),
    )


def test_a_header_is_utf_8_as_a_body_is(answering, generate):
    answering()
    header, body = generate(headers={"x-session-id": "müller".encode()}), generate({"session_id": "müller"})
    assert header == body != ""


def value_of(source: str) -> float:
    return REGISTRY.get_sample_value("specstore_request_conversations_total", {"source": source}) or 0.0


def test_calls_are_counted_by_where_they_name_a_session(answering, generate):
    answering(conversation="header:x-mine,body:prompt_cache_key")
    labels = ("header:x-mine", "body:prompt_cache_key", UNUSABLE)
    count = lambda: [value_of(label) for label in labels]  # noqa: E731
    before = count()
    generate(headers={"x-mine": "a"})
    generate({"prompt_cache_key": 7}, {"x-mine": ""})
    generate({"prompt_cache_key": "b"})
    generate({"prompt_cache_key": "b"})
    assert [after - begun for after, begun in zip(count(), before, strict=True)] == [1, 2, 1]


@pytest.mark.parametrize("option", ["", "header:", "body:", "body:a.", "header:a b", "off,agents", "agents,", "x-session-id", "body:ü"])  # fmt: skip
def test_what_names_no_source_is_refused(option):
    with pytest.raises(ValueError, match="option request_conversation: .* is not agents, header:NAME or"):
        Options(request_conversation=option)


def test_the_page_on_requests_lists_the_places():
    page = (Path(__file__).parents[3] / "docs" / "requests.md").read_text()
    table = page.partition("| `agents` stands for | sent by |\n|---|---|\n")[2].partition("\n\n")[0]
    assert table.splitlines() == [f"| `{source}` | {sender} |" for source, sender in AGENTS.items()]


def test_a_request_of_another_kind_names_no_session():
    """SGLang's gRPC server gives one that has headers and no list of them."""
    obj = GenerateReqInput(text=["a"], sampling_params=[{}])
    obj.normalize_batch_and_arguments()
    request_hook._before_request(None, obj, SimpleNamespace(headers={"session-id": "s"}))
    assert wishes_of(obj) == [{}]
