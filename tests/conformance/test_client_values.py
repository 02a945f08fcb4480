"""Whatever a client names or counts, the server goes on, and its neighbours' answers are plain decoding's."""

from __future__ import annotations

import itertools
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from sglang_patches.host.versions import INSTALLED, TESTED
from tests.conformance.client_values import LENGTHS, Odd, odd_requests
from tests.support.servers.engine import Endpoint

NAMES = [*("x" * length for length in LENGTHS), "ü" * 129, "a\x00\x1b[31m\u202e\n", "sha256:" + "0" * 64]
NO_UNICODE = "\ud800"  # half of a surrogate pair: SGLang refuses the JSON


def post(server: Endpoint, path: str, body: dict[str, Any]) -> requests.Response:
    """JSON of any strings, lone surrogates included."""
    data = json.dumps(body).encode()
    return requests.post(server.url + path, data, headers={"Content-Type": "application/json"}, timeout=300)


AT_ONCE = 8
ROUND = 40  # odd requests, and then a neighbour's


@pytest.mark.parametrize("inputs", [80, pytest.param(10**5 // 12, marks=pytest.mark.long)])
def test_odd_values_end_no_server_and_change_no_neighbour_s_answer(method, server, plain, prompts, inputs):
    """In all about 10^5 inputs over six methods with two setups each, in `make test-long`."""
    expected = plain.generate(prompts[0], temperature=0, max_new_tokens=12)["output_ids"]
    odd = odd_requests(zlib.crc32(server.spec.name.encode()) + inputs, prompts[1][:8])

    def ask(one: Odd) -> int:
        return post(server, one.path, one.body).status_code

    for begin in range(0, inputs, ROUND):
        batch = list(itertools.islice(odd, ROUND))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            neighbour = pool.submit(post, server, "/generate", greedy_request(prompts[0]))
            try:
                list(pool.map(ask, batch))
                assert neighbour.result().json()["output_ids"] == expected
            except requests.RequestException as error:
                shown = "\n".join(one.shown for one in batch)
                raise AssertionError(
                    f"round {begin}: {error}\nof these one ends the server:\n{shown}"
                ) from error


def greedy_request(ids, **fields) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 12, **fields.pop("sampling_params", {})}
    prompt = {} if "text" in fields else {"input_ids": ids}
    return {**prompt, "sampling_params": sampling, **fields}


@pytest.mark.parametrize("field", ["rid", "conversation"])
def test_a_name_of_any_kind_is_served(server, plain, prompts, field):
    expected = plain.generate(prompts[0], temperature=0, max_new_tokens=12)["output_ids"]
    for name in NAMES:
        answer = post(server, "/generate", naming(prompts[0], field, name))
        assert answer.ok, (name[:20], len(name), answer.text[:300])
        assert answer.json()["output_ids"] == expected
    assert post(server, "/generate", naming(prompts[0], field, NO_UNICODE)).status_code == 400


def naming(ids, field: str, name: str) -> dict[str, Any]:
    if field == "rid":
        return greedy_request(ids, rid=name)
    wishes = {"custom_params": {"specstore": {"conversation": name}}}
    return greedy_request(ids, sampling_params=wishes)


# An answer that nothing can be said in. Earlier versions end it as one that is at its end.
ENDED = {400, 500} if TESTED[-1] == INSTALLED else {200, 400, 500}


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_grammar_that_allows_no_token_ends_its_request_alone(server, plain, prompts, temperature):
    """The model has no such character. SGLang's own draw from nothing ends the server."""
    impossible = {"regex": "\u202e+", "temperature": temperature, "ignore_eos": True}
    expected = plain.generate(prompts[0], temperature=0, max_new_tokens=12)["output_ids"]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [greedy_request(ids, sampling_params=impossible) for ids in prompts[:4]]
        failed = [pool.submit(post, server, "/generate", body) for body in asked]
        neighbour = pool.submit(post, server, "/generate", greedy_request(prompts[0]))
        assert neighbour.result().json()["output_ids"] == expected
        assert {answer.result().status_code for answer in failed} <= ENDED


VOCAB_BEYOND = 1 << 20
REFUSED = {
    "prompt: it has no tokens": {"text": ""},
    "input_ids: 1048576 is outside": {"input_ids": [5, VOCAB_BEYOND]},
    "input_ids: -1 is outside": {"input_ids": [5, -1]},
    "top_logprobs_num: 1048576 is outside": {"return_logprob": True, "top_logprobs_num": VOCAB_BEYOND},
    "top_logprobs_num: -1 is outside": {"return_logprob": True, "top_logprobs_num": -1},
    "session_params.id": {"session_params": {"id": {}}},
    "return_hidden_states: Expected": {"return_hidden_states": []},
    "custom_logit_processor: it cannot be loaded": {"custom_logit_processor": "x"},
    "custom_logit_processor: it cannot be loaded: ": {"custom_logit_processor": ""},
    "lora_id: Expected": {"lora_id": ["a"]},
    "positional_embed_overrides: not from a client": {"positional_embed_overrides": ""},
    "custom_labels: 'nobody s' is none of": {"custom_labels": {"nobody s": "x"}},
    (OWN_NOTE := "sampling_params.is_normalized: not from a client"): {
        "sampling_params": {"is_normalized": True}
    },
}
# By version, SGLang's own refusal.
OF_SGLANG = {
    ("0.5.17", "prompt: it has no tokens"): "texts cannot be empty",
    **{(version, OWN_NOTE): "unknown field `is_normalized`" for version in ("0.5.22", "0.5.23")},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_end_the_server_is_refused(server, plain, prompts, message):
    answer = post(server, "/generate", greedy_request(prompts[0], **REFUSED[message]))
    said = OF_SGLANG.get((INSTALLED, message), message)
    assert answer.status_code == 400 and said in answer.text, answer.text[:300]
    expected = plain.generate(prompts[0], temperature=0, max_new_tokens=12)["output_ids"]
    assert post(server, "/generate", greedy_request(prompts[0])).json()["output_ids"] == expected
