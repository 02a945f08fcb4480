"""What requests may say, as the operator has it (`--specstore-request-wishes`), through SGLang's own resolution and functions."""

import asyncio
import copy
import functools
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest  # noqa: E402
from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: E402
from sglang.srt.managers.tokenizer_manager import TokenizerManager  # noqa: E402
from starlette.requests import Request  # noqa: E402

from datastore_service.protocol.types import MAX_PRIORS  # noqa: E402
from sglang_patches.entry.predictions import _around_chat  # noqa: E402
from sglang_patches.entry.request_wishes import OF_A_SERVICE, WISHES  # noqa: E402
from sglang_patches.options import Options  # noqa: E402
from tests.unit.entry.conftest import manager  # noqa: E402
from tests.unit.entry.test_predictions import Serving, whole  # noqa: E402

SERVICE = "unix:/run/specstore.sock"
VALUES = {
    "conversation": "c",
    "draft": ["datastore"],
    "group": "prompt 7",
    "nodes": 3,
    "priors": ["python"],
    "publish": False,
    "reference": "a file",
    "sources": True,
    "user": "ada",
    "workspace": "project",
}
OTHERS = {wish: value for wish, value in VALUES.items() if wish != "workspace"}


def enter(*wishes: dict, headers: tuple = ()) -> GenerateReqInput:
    """A call with a request for each of these wishes, as SGLang has it when it makes its state."""
    sampling = [{"custom_params": {"specstore": each}} for each in wishes]
    obj = GenerateReqInput(text=["a question"] * len(wishes), sampling_params=sampling)
    obj.normalize_batch_and_arguments()
    request = Request({"type": "http", "headers": list(headers)})
    TokenizerManager._init_req_state(manager(), obj, request)
    return obj


def test_there_is_a_value_for_each_wish():
    assert VALUES.keys() == WISHES.keys()


@pytest.mark.parametrize("wish", WISHES)
def test_a_wish_that_requests_may_not_have_is_refused_by_name(answering, wish):
    answering = functools.partial(answering, endpoint=SERVICE)
    answering(wishes=",".join(WISHES.keys() - {wish}))
    refusal = f"^custom_params.specstore.{wish}: this server takes no wish '{wish}' from requests"
    with pytest.raises(ValueError, match=rf"{refusal} \(--specstore-request-wishes\)"):
        enter({}, {wish: VALUES[wish]})
    enter(VALUES | {"publish": True, wish: None})
    answering(wishes="off")
    with pytest.raises(ValueError, match=refusal):
        enter({wish: VALUES[wish]})
    answering(wishes=wish)
    enter({wish: VALUES[wish]})


@pytest.mark.parametrize(
    "priors", ["python", [7], [""], ["x" * 257], ["\ud800"], ["p"] * (MAX_PRIORS + 1)], ids=repr
)
def test_what_are_no_names_of_priors_is_refused(answering, priors):
    answering(endpoint=SERVICE)
    with pytest.raises(
        ValueError, match=r"^custom_params.specstore.priors: .* is not a list of at most 8 names of 1 to 256"
    ):
        enter({"priors": priors})


@pytest.mark.parametrize("name", [7, "", "x" * 257, "\ud800", "sha256:1"], ids=repr)
@pytest.mark.parametrize("wish", ["group", "workspace"])
def test_what_is_no_name_of_a_shared_text_is_refused(answering, wish, name):
    answering(wishes=wish, endpoint=SERVICE)
    with pytest.raises(ValueError, match=rf"^custom_params.specstore.{wish}: .* is not a name of 1 to 256"):
        enter({wish: name})


def test_siblings_need_no_service_and_may_publish_nothing(answering):
    """Unlike what a workspace has, a group's text goes with its requests."""
    answering(endpoint="embedded")
    enter({"group": "prompt 7", "publish": False})


@pytest.mark.parametrize("wish", OF_A_SERVICE)
def test_an_embedded_datastore_has_neither_priors_to_choose_from_nor_workspaces(answering, wish):
    answering(wishes=",".join(WISHES))
    with pytest.raises(ValueError, match=rf"^custom_params.specstore.{wish}: an embedded datastore has none"):
        enter({wish: VALUES[wish]})


def test_by_default_prompts_are_not_shared(answering):
    """All else they may have."""
    answering(endpoint=SERVICE)
    enter(OTHERS)
    with pytest.raises(ValueError, match="^custom_params.specstore.workspace: this server takes no wish"):
        enter({"workspace": "project"})
    assert set(Options().permitted_wishes) == WISHES.keys() - {"workspace"}


def test_what_is_not_to_be_remembered_is_shared_with_nobody(answering):
    answering(wishes="workspace,publish", endpoint=SERVICE)
    with pytest.raises(ValueError, match="^custom_params.specstore.workspace: not with publish: false"):
        enter({"workspace": "project", "publish": False})
    enter({"workspace": "project", "publish": True})


def test_what_the_entry_adds_is_no_wish_of_the_request(answering):
    """Also in further samples, of which SGLang makes the state anew."""
    answering("header:x-tenant", wishes="off")
    headers = ((b"x-tenant", b"acme"), (b"x-session-id", b"s"))
    (sampling,) = enter({}, headers=headers).sampling_params
    sample = copy.copy(GenerateReqInput(text="a question", rid="sample", sampling_params=sampling))
    TokenizerManager._init_req_state(manager(), sample)
    added = sample.sampling_params["custom_params"]["specstore"]
    assert added.keys() == {"tenant", "conversation"}


def test_who_may_not_bring_a_reference_may_bring_no_prediction(answering):
    answering(wishes=",".join(WISHES.keys() - {"reference"}))
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    prediction = {"prediction": {"type": "content", "content": "a file"}}

    async def receive() -> dict:
        return {"type": "http.request", "body": json.dumps(body | prediction).encode()}

    raw = Request({"type": "http", "headers": []}, receive)
    answer = asyncio.run(_around_chat(whole, Serving(), ChatCompletionRequest(**body), raw))
    assert answer.status_code == 400
    assert json.loads(answer.body)["message"].startswith("prediction: this server takes no wish 'reference'")


@pytest.mark.parametrize(
    ("given", "named"), [("draft,node", "node"), ("", ""), ("tenant", "tenant"), ("draft, nodes", " nodes")]
)
def test_a_name_of_no_wish_ends_the_start(answering, given, named):
    names = ", ".join(WISHES)
    with pytest.raises(ValueError, match=f"^--specstore-request-wishes: '{named}' is none of {names}$"):
        answering(wishes=given)


def test_a_caller_in_python_is_a_request_too(answering):
    answering(wishes="draft")
    obj = GenerateReqInput(text="a", sampling_params={"custom_params": {"specstore": {"nodes": 1}}})
    obj.normalize_batch_and_arguments()
    with pytest.raises(ValueError, match="custom_params.specstore.nodes"):
        TokenizerManager._init_req_state(SimpleNamespace(enable_trace=False, rid_to_state={}), obj)
