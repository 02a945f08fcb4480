"""OpenAI's `prediction`, and references on SGLang's own endpoint: every answer is compared with a plain server's."""

from __future__ import annotations

import json

import pytest
import requests

from sglang_patches.entry.references import MOST_BYTES
from tests.conformance.conftest import Plain, is_adaptive
from tests.support.servers.engine import Endpoint

CHAT = "/v1/chat/completions"
ASKED = {
    "model": "default",
    "messages": [{"role": "user", "content": "name three colours."}],
    "max_tokens": 48,
    "temperature": 0,
    "ignore_eos": True,
}


def post(server: Endpoint, path: str = CHAT, **fields: object) -> dict:
    answer = requests.post(server.url + path, json=ASKED | fields, timeout=300)
    assert answer.ok, answer.text
    return answer.json()


def said(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


def predicted(text: str | list) -> dict:
    return {"prediction": {"type": "content", "content": text}}


def details(usage: dict) -> tuple[int, int]:
    told = usage["completion_tokens_details"]
    return told["accepted_prediction_tokens"], told["rejected_prediction_tokens"]


@pytest.fixture(scope="module")
def expected(plain) -> str:
    return said(post(plain))


def edited(text: str) -> str:
    """With words in others' places, some left out and some put in."""
    third = len(text) // 3
    return text[:third] + "other words" + text[third + 4 : 2 * third] + text[2 * third + 9 :]


def test_an_answer_is_plain_decodings_whatever_is_predicted(server, expected):
    kinds = {
        "right": expected,
        "edited": edited(expected),
        "another": "To whom it may concern. " * 40,
        "empty": "",
        "one letter": "e" * 2000,
    }
    accepted = {}
    for kind, text in kinds.items():
        answer = post(server, **predicted(text))
        assert said(answer) == expected
        accepted[kind], rejected = details(answer["usage"])
        assert accepted[kind] + rejected <= answer["usage"]["completion_tokens"] * 16
    assert accepted["empty"] == 0
    assert is_adaptive(server) or accepted["right"] > accepted["another"]


def test_a_stream_says_what_was_accepted(server, expected):
    body = ASKED | predicted(expected) | {"stream": True, "stream_options": {"include_usage": True}}
    with requests.post(server.url + CHAT, json=body, stream=True, timeout=300) as response:
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith(b"data: {")]
    text = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(text) == expected
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    accepted, _ = details(usage)
    assert accepted > 0 or is_adaptive(server)


def test_several_answers_are_counted_together(server, expected):
    answer = post(server, n=2, **predicted([{"type": "text", "text": expected}]))
    assert [choice["message"]["content"] for choice in answer["choices"]] == [expected] * 2
    assert (
        is_adaptive(server)
        or details(answer["usage"])[0] > details(post(server, **predicted(expected))["usage"])[0]
    )


def test_without_a_prediction_the_usage_is_sglang_s(server, plain):
    ours, theirs = post(server)["usage"], post(plain)["usage"]
    assert ours.keys() == theirs.keys() and ours.get("completion_tokens_details") is None


def test_a_request_that_wants_no_draft_ignores_it(server, expected):
    answer = post(server, **predicted(expected), custom_params={"specstore": {"draft": False}})
    assert said(answer) == expected and details(answer["usage"]) == (0, 0)


def test_references_of_a_batch(server: Endpoint, plain: Plain, prompts):
    """Each request its own, and on SGLang's own endpoint."""
    asked = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    plainly = [plain.generate(ids, **asked) for ids in prompts[:3]]
    texts = [plainly[0]["text"], ["of no use", plainly[1]["text"]], "of no use"]
    sampling = [asked | {"custom_params": {"specstore": {"reference": text}}} for text in texts]
    body = {"input_ids": prompts[:3], "sampling_params": sampling}
    answers = requests.post(server.url + "/generate", json=body, timeout=300).json()
    assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in plainly]
    told = [answer["meta_info"]["specstore"]["prediction"]["accepted"] for answer in answers]
    assert is_adaptive(server) or min(told[:2]) > told[2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (predicted("é" * MOST_BYTES), f"prediction: {2 * MOST_BYTES} bytes exceed {MOST_BYTES}"),
        ({"prediction": "text"}, "prediction: Expected `object`, got `str`"),
        (predicted(["text"]), "prediction: Expected `object`, got `str`"),
        (
            predicted("text") | {"custom_params": {"specstore": {"reference": [7]}}},
            "custom_params.specstore.reference: 7 is not a string",
        ),
        (
            {"custom_params": {"specstore": {"reference": 7}}},
            "custom_params.specstore.reference: 7 is not a string or a list of strings",
        ),
    ],
)
def test_what_is_none_is_answered_400(server, fields, message):
    answer = requests.post(server.url + CHAT, json=ASKED | fields, timeout=300)
    assert answer.status_code == 400 and message in answer.json()["message"]
