"""What SGLang's users have goes on working with SSSD: every answer is compared with a plain server's.

The SSSD server prefills in chunks of 128 tokens, so long prompts are chunked in every test.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from benchmarks.serve.cases import Case, Request
from benchmarks.serve.measure import breakdown, measure
from sglang_patches.launch.metrics import samples
from sglang_patches.launch.servers import ServerSpec
from sglang_patches.workers.metrics import PHASES, RETRIEVE
from tests.e2e.services import DatastoreService, serving
from tests.support.servers import SglangServer, running
from tests.waiting import eventually

NEW_TOKENS = 40
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def datastore(logs) -> Iterator[DatastoreService]:
    with serving(logs / "features-datastore.log") as service:
        yield service


@pytest.fixture(scope="module")
def server(demo_model, datastore, logs) -> Iterator[SglangServer]:
    flags = ("--specstore-endpoint", datastore.endpoint, "--specstore-deadline-ms", "200")
    flags += ("--specstore-length", "static")
    flags += ("--chunked-prefill-size", "128", "--enable-metrics", "--enable-cache-report")
    with running(ServerSpec("features", demo_model, "SSSD", dtype="float32", flags=flags), logs) as server:
        yield server


@pytest.fixture(scope="module")
def long_ids(prompt_ids) -> list[int]:
    """A prompt of several chunks."""
    ids = [token for row in prompt_ids for token in row]
    assert len(ids) > 500
    return ids[:500]


def greedy(server: SglangServer, ids, **sampling) -> dict:
    return server.generate(ids, temperature=0, **{"max_new_tokens": NEW_TOKENS, **sampling})


def metrics(server: SglangServer) -> dict[str, float]:
    return {sample.name: sample.value for sample in samples(server.url)}


def test_streamed_pieces_are_the_whole_answer(server, prompt_ids):
    whole = greedy(server, prompt_ids[0])["output_ids"]
    body = {
        "input_ids": prompt_ids[0],
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS},
        "stream": True,
    }
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=300) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    pieces = [json.loads(line) for line in lines[:-1]]
    assert len(pieces) > 2
    assert pieces[-1]["output_ids"] == whole
    assert all(pieces[-1]["text"].startswith(piece["text"].rstrip("\ufffd")) for piece in pieces)


def test_chat_completions_stream(server):
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    url = server.url + "/v1/chat/completions"
    whole = requests.post(url, json=body, timeout=300).json()["choices"][0]["message"]["content"]
    with requests.post(url, json=body | {"stream": True}, stream=True, timeout=300) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith(b"data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    assert "".join(deltas) == whole != ""


@pytest.mark.parametrize(
    "stop", [{"stop": [" the", "."]}, {"stop_token_ids": [260, 30]}, {"min_new_tokens": 30}]
)
def test_the_end_of_an_answer(server, plain, prompt_ids, stop):
    """A drafted path may run past a stop: nothing after it may show."""
    for ids in prompt_ids[:3]:
        ours, theirs = greedy(server, ids, **stop), greedy(plain, ids, **stop)
        assert ours["output_ids"] == theirs["output_ids"]
        assert ours["text"] == theirs["text"]
        assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"]


def test_several_answers_to_one_prompt(server, prompt_ids):
    alone = greedy(server, prompt_ids[1])["output_ids"]
    answers = greedy(server, prompt_ids[1], n=3)
    assert [answer["output_ids"] for answer in answers] == [alone] * 3
    sampled = server.generate(prompt_ids[1], n=3, temperature=1.0, max_new_tokens=NEW_TOKENS)
    assert len({tuple(answer["output_ids"]) for answer in sampled}) > 1


def test_logprobs(server, plain, prompt_ids):
    wanted = {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0}
    ours, theirs = (greedy(s, prompt_ids[2], top=wanted)["meta_info"] for s in (server, plain))
    for field in ("input_token_logprobs", "output_token_logprobs"):
        assert [token for _, token, _ in ours[field]] == [token for _, token, _ in theirs[field]]
        pairs = zip(ours[field], theirs[field], strict=True)
        assert all(a == b or a == pytest.approx(b, abs=2e-3) for (a, *_), (b, *_) in pairs)
    assert len(ours["output_top_logprobs"]) == len(theirs["output_top_logprobs"]) == NEW_TOKENS
    for ranked, expected in zip(ours["output_top_logprobs"], theirs["output_top_logprobs"], strict=True):
        assert [value for value, *_ in ranked] == pytest.approx([value for value, *_ in expected], abs=2e-3)


def test_json_schema(server, plain, prompt_ids):
    wanted = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 60}
    ours, theirs = greedy(server, prompt_ids[0], **wanted), greedy(plain, prompt_ids[0], **wanted)
    assert ours["text"] == theirs["text"]
    assert set(json.loads(ours["text"])) == {"name", "age"}


def test_chunked_prefill_and_the_radix_cache(server, plain, long_ids):
    expected = greedy(plain, long_ids)["output_ids"]
    first = greedy(server, long_ids)
    again = greedy(server, long_ids)
    assert first["output_ids"] == again["output_ids"] == expected
    assert again["meta_info"]["cached_tokens"] > 400
    shared_prefix = greedy(server, long_ids[:300])
    assert shared_prefix["meta_info"]["cached_tokens"] > 200
    assert shared_prefix["output_ids"] == greedy(plain, long_ids[:300])["output_ids"]


def test_flush_cache(server, prompt_ids):
    before = greedy(server, prompt_ids[3])
    assert requests.post(server.url + "/flush_cache", timeout=60).status_code == 200
    after = greedy(server, prompt_ids[3])
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["cached_tokens"] == 0


def test_an_aborted_request_leaves_the_others_alone(server, plain, prompt_ids):
    expected = greedy(plain, prompt_ids[4], max_new_tokens=120)["output_ids"]
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(greedy, server, prompt_ids[4], max_new_tokens=120) for _ in range(2)]
        body = {
            "rid": "to-be-aborted",
            "input_ids": prompt_ids[5],
            "sampling_params": {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True},
        }
        aborted = pool.submit(requests.post, server.url + "/generate", json=body, timeout=600)
        time.sleep(2)
        requests.post(server.url + "/abort_request", json={"rid": "to-be-aborted"}, timeout=60)
        assert aborted.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert [answer.result()["output_ids"] for answer in others] == [expected] * 2


def test_a_client_that_hangs_up(server, prompt_ids):
    body = {
        "input_ids": prompt_ids[5],
        "sampling_params": {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True},
        "stream": True,
    }
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=300) as response:
        next(response.iter_lines())
    eventually(lambda: metrics(server)["sglang:num_running_reqs"] == 0, "it is still running", 60)


def test_no_request_leaves_a_session(server, datastore, prompt_ids):
    """Neither those of the tests before nor one that ends with its prefill."""
    greedy(server, prompt_ids[0], max_new_tokens=1)
    assert requests.get(server.url + "/health_generate", timeout=60).status_code == 200
    eventually(lambda: datastore.sessions() == 0, "sessions are left", 60)


def test_requests_of_all_kinds_in_one_batch(server, plain, prompt_ids, long_ids):
    """Chunked, constrained, penalised, stopped and plain greedy requests decoded together."""
    kinds = [
        (long_ids, {}),
        (prompt_ids[0], {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 60}),
        (prompt_ids[1], {"stop": ["."]}),
        (prompt_ids[2], {}),
        (prompt_ids[3], {"logit_bias": {"30": 2.5}}),
    ]
    expected = [greedy(plain, ids, **wishes)["output_ids"] for ids, wishes in kinds]
    with ThreadPoolExecutor(2 * len(kinds)) as pool:
        answers = list(pool.map(lambda kind: greedy(server, kind[0], **kind[1])["output_ids"], kinds * 2))
    assert answers == expected * 2


def test_metrics(server, prompt_ids):
    greedy(server, prompt_ids[0])
    seen = metrics(server)
    assert seen["sglang:spec_accept_length"] > 1
    assert seen["sglang:generation_tokens_total"] > 0


def test_the_serving_benchmark_sees_where_the_time_goes(server, prompt_ids):
    group = [Request("any", ids) for ids in prompt_ids[:3]]
    record = measure(server, group, 2, NEW_TOKENS, Case("any", {}))
    assert record["decoded"] == sum(len(output) - 1 for output in record["outputs"]) > 0
    phases = record["phases"]
    assert set(phases) == {*PHASES, RETRIEVE}
    assert phases["forward"] > phases["verify"] > 0 and phases["draft"] >= phases[RETRIEVE] > 0
    assert {(batch, width) for batch, width, *_ in record["cells"]} <= {(1, 16), (2, 16)}
    shares = breakdown([record])
    assert 0 < shares["retrieval"] < shares["forward"] < 1 and shares["rest"] > 0
