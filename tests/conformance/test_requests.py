"""What a request may ask for, through each of SGLang's interfaces: the answer is plain decoding's, with all that it tells."""

from __future__ import annotations

import functools
import json
import re
import runpy
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_patches.host.versions import INSTALLED, TESTED
from tests.conformance.test_features import ONLY_EMBEDDED, ONLY_GRPC
from tests.support.servers.engine import Endpoint
from tests.support.servers.metrics import metric

VERIFIED = "specstore_verified_nodes_total"
SETTINGS = Path(__file__).parents[2] / "docs" / "settings.py"
REFUSED = {
    name: value for row in runpy.run_path(str(SETTINGS))["REQUESTS"] for name, value in row.given.items()
}
NEWEST = pytest.mark.skipif(TESTED[-1] != INSTALLED, reason="the fields are those of the newest version")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9999}}, "required": ["a"]}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "q", "schema": SCHEMA, "end": "q"}],
    "triggers": ["q"],
}
NAMED = {"name": "n", "schema": SCHEMA}
# Of an answer: names, times, and what tells of speculation or of a cache.
OF_THE_MOMENT = re.compile("id|.*_id|created.*|.*cached.*|.*latency|.*throughput|.*_time|.*_ts|spec.*")


def generate(max_new_tokens: int = 24, sampling: dict[str, Any] | None = None, **fields: Any):
    wanted = {"temperature": 0, "max_new_tokens": max_new_tokens} | (sampling or {})
    return "/generate", {"sampling_params": wanted} | fields


def complete(**fields: Any):
    return "/v1/completions", {"temperature": 0, "max_tokens": 24} | fields


def chat(**fields: Any):
    messages = [{"role": "user", "content": "name three colours."}]
    return "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 24} | fields


def respond(**fields: Any):
    return "/v1/responses", {
        "input": "name three colours.",
        "temperature": 0,
        "max_output_tokens": 24,
    } | fields


ALL_LOGPROBS = {
    "return_logprob": True,
    "top_logprobs_num": 2,
    "token_ids_logprob": [3, 4],
    "logprob_start_len": 0,
}
CASES = {
    "nothing said": generate(0, **ALL_LOGPROBS),
    "log-probabilities": generate(**ALL_LOGPROBS, return_text_in_logprobs=True),
    "flat log-probabilities": generate(
        **ALL_LOGPROBS, return_flat_raw_top_logprobs=True, return_flat_raw_output_top_logprobs=True
    ),
    "experts that no server tells": generate(
        return_routed_experts=True, routed_experts_start_len=0, return_indexer_topk=True
    ),
    "the text as it is": generate(
        sampling={
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            "stop": ["3", "e"],
        },
        return_prompt_token_ids=True,
    ),
    "a regular expression ends it": generate(sampling={"stop_regex": ["[a-e][0-9]", ",."]}),
    "regular expression": generate(sampling={"regex": "(ab|cd){3,12}[0-9]+"}),
    "grammar": generate(sampling={"ebnf": 'root ::= "ab" [c-f]+'}),
    "structural tags": generate(sampling={"structural_tag": json.dumps(TAGS)}),
    "a processor of its own": generate(
        custom_logit_processor=DisallowedTokensLogitsProcessor.to_str(),
        sampling={"custom_params": {"token_ids": [6, 18, 44]}},
    ),
    "caches and order": generate(
        priority=3, routing_key="k", extra_key="e", cache_salt="s", routed_dp_rank=0, require_reasoning=True
    ),
    "completion, the prompt too": complete(echo=True, logprobs=2, n=2),
    "completion, the best": complete(best_of=2, seed=3, suffix="x", user="u", data_parallel_rank=0),
    "completion, tokens": complete(return_token_ids=True, min_tokens=20, stop_token_ids=[4, 44], stop="d"),
    "completion, JSON": complete(json_schema=json.dumps(SCHEMA)),
    "completion, format": complete(response_format={"type": "json_schema", "json_schema": NAMED}),
    "chat, log-probabilities": chat(logprobs=True, top_logprobs=2),
    "chat, format": chat(response_format={"type": "json_schema", "json_schema": NAMED}),
    "chat, regular expression": chat(regex="[ab]{3,9}", min_tokens=2),
    "chat, shorter": chat(max_completion_tokens=7, reasoning_effort="low", stop_regex="[0-9][a-z]"),
    "chat, all that is told": chat(
        return_meta_info=True,
        return_prompt_token_ids=True,
        return_token_ids=True,
        return_input_ids_in_sglext=True,
        return_output_ids_in_sglext=True,
        return_cached_tokens_details=True,
    ),
    "chat, going on": chat(
        continue_final_message=True,
        messages=[{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}],
    ),
    "response": respond(),
    # Without a repetition penalty: SGLang applies the kinds in an order that differs from process to process.
    "response, penalised": respond(frequency_penalty=0.5, presence_penalty=0.3, stop=["ab"]),
    "response, repetition penalised": respond(repetition_penalty=1.2),
    "response, log-probabilities": respond(top_logprobs=2, include=["message.output_text.logprobs"]),
    "scores": ("/v1/score", {"query": "abc", "items": ["def", "ghi"], "label_token_ids": [3, 4]}),
}


@pytest.fixture(scope="session")
def plainly(plain) -> Callable[[str, dict[str, Any]], Any]:
    """What plain decoding tells: the same for every method, and asked for once."""
    known = functools.cache(lambda path, body: told(plain, path, json.loads(body)))
    return lambda path, body: known(path, json.dumps(body, sort_keys=True))


@pytest.fixture(scope="session")
def drafted() -> Iterator[dict[str, list[bool]]]:
    """Of each method's cases, whether a draft was verified: of most, as a server of static length has one for all but the shortest."""
    by_method = defaultdict(list)
    yield by_method
    assert all(sum(of) >= len(of) // 2 for of in by_method.values()), "equal answers show nothing"


@NEWEST
@ONLY_EMBEDDED
@pytest.mark.parametrize("case", CASES)
def test_an_answer_tells_what_plain_decoding_s_tells(
    method, server, plainly, spelling_model, prompts, case, drafted
):
    path, body = CASES[case]
    prompt = {"/generate": {"input_ids": prompts[0]}, "/v1/completions": {"prompt": prompts[0]}}.get(path, {})
    asked = body | prompt | {"model": str(spelling_model)}
    expected, verified = plainly(path, asked), metric(server.url, VERIFIED)
    for _ in range(2):  # the live tier drafts what was said
        assert told(server, path, asked) == _about(expected)
    drafted[method.name].append(metric(server.url, VERIFIED) > verified)


OLLAMA = {
    "/api/chat": {"messages": [{"role": "user", "content": "name three colours."}]},
    "/api/generate": {"prompt": "name three colours."},
}


@ONLY_GRPC
@pytest.mark.parametrize("path", OLLAMA)
def test_the_pieces_of_ollama_s_stream_are_the_whole_answer(server, plain, path):
    if TESTED[-1] != INSTALLED and path == "/api/chat":
        pytest.skip("SGLang before 0.5.23 answers no chat of Ollama's without a stream")
    body = {"model": "m", "options": {"temperature": 0, "num_predict": 40}} | OLLAMA[path]
    whole = _ollama_text(requests.post(plain.url + path, json=body | {"stream": False}, timeout=300).json())
    for _ in range(2):  # the live tier drafts what was said, so that the last step says more
        streamed = requests.post(server.url + path, json=body | {"stream": True}, timeout=300)
        *pieces, end = map(json.loads, streamed.text.splitlines())
        assert "".join(map(_ollama_text, pieces)) == whole != ""
        assert [piece["done"] for piece in pieces] == [False] * len(pieces)
        assert end["done"] and _ollama_text(end) == ""


def _ollama_text(answer: dict[str, Any]) -> str:
    return answer["message"]["content"] if "message" in answer else answer["response"]


def told(server: Endpoint, path: str, body: dict[str, Any]) -> Any:
    answer = requests.post(server.url + path, json=body, timeout=300)
    assert answer.ok, answer.text[:300]
    return _lasting(answer.json())


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _lasting(item) for name, item in value.items() if not OF_THE_MOMENT.fullmatch(name)}
    return [_lasting(item) for item in value] if isinstance(value, list) else value


def _about(value: Any) -> Any:
    """What equals the value but for rounding."""
    if isinstance(value, dict):
        return {name: _about(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_about(item) for item in value]
    return pytest.approx(value, abs=2e-3) if isinstance(value, float) else value


@ONLY_GRPC
def test_hidden_states_are_those_of_the_tokens_that_are_said(method, server, plain, prompts):
    """Those of a prompt are told as far as it is not cached."""
    if method.name == "EAGLE3":
        pytest.skip("SGLang tells the states that the head reads, of several layers")
    asked = generate(return_hidden_states=True)[1] | {"input_ids": prompts[0]}
    states = []
    for endpoint in (plain, server, server):
        answer = told(endpoint, "/generate", asked)
        states.append(answer["meta_info"]["hidden_states"][1 - len(answer["output_ids"]) :])
    for ours in states[1:]:
        assert ours == [pytest.approx(row, abs=3e-2) for row in states[0]]


@NEWEST
@ONLY_GRPC
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_table_says_is_refused_is_answered_400(server, prompts, name):
    given = {name: REFUSED[name]}
    sampling = {"max_new_tokens": 4} | (given if name in SamplingParams.__struct_fields__ else {})
    body = {"input_ids": prompts[0], "sampling_params": sampling} | ({} if name in sampling else given)
    answer = requests.post(server.url + "/generate", json=body, timeout=300)
    assert answer.status_code == 400, answer.text[:300]
