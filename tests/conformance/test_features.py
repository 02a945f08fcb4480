"""What SGLang's users have goes on working with every method: every answer is compared with a plain server's.

The servers prefill in chunks of 64 tokens, so most prompts are chunked in every test.
"""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from packaging.version import Version

from benchmarks.serve.cases import Case, Request
from benchmarks.serve.measure import breakdown, measure
from sglang_patches.host.versions import INSTALLED
from sglang_patches.metrics import PHASES, RETRIEVE
from tests.conformance.conftest import ENDED_SECONDS, TENANT_HEADER, assert_drafted, is_adaptive
from tests.support.servers.engine import Endpoint
from tests.support.servers.metrics import metric
from tests.waiting import eventually, mostly

NEW_TOKENS = 40
# The live tier proposes MOST tokens of an answer of so many if its tenant has read it, and none if it has read nothing.
ANSWER, MOST = 200, 120
UNDRAFTED = "what a tenant has said is not drafted for it: this shows nothing"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "age"],
}
CONSTRAINED = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 60}
PENALISED = {
    "repetition": {"repetition_penalty": 1.3},
    "frequency and presence": {"frequency_penalty": 0.4, "presence_penalty": 0.3},
    "min_new_tokens": {"min_new_tokens": 30, "stop_token_ids": [5, 9, 14, 20]},
    "bias": {"logit_bias": {"30": 2.5}},
}
ONLY_GRPC = pytest.mark.parametrize("server", ["overlap, gRPC"], indirect=True)
ONLY_EMBEDDED = pytest.mark.parametrize("server", ["synchronous, embedded"], indirect=True)


def greedy(server: Endpoint, ids, **sampling) -> dict:
    return server.generate(ids, temperature=0, **{"max_new_tokens": NEW_TOKENS, **sampling})


def many(server: Endpoint, prompts, concurrency: int = 8, **sampling) -> list[dict]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, **sampling}
    return server.generate_many(prompts, concurrency, **sampling)


def output_ids(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def outputs(server: Endpoint, prompts, concurrency: int = 8, **sampling) -> list[list[int]]:
    return output_ids(many(server, prompts, concurrency, **sampling))


@pytest.mark.parametrize("batch", [1, 16])
def test_greedy_output_is_plain_decodings(server, plain, prompts, batch):
    prompts = prompts[:6] if batch == 1 else prompts
    answers = many(server, prompts, batch, ignore_eos=True)
    assert output_ids(answers) == outputs(plain, prompts, ignore_eos=True)
    assert_drafted(server, answers)


@ONLY_EMBEDDED
def test_drafts_are_accepted(server, prompts):
    answers = many(server, prompts, ignore_eos=True)
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert len(answers) * (NEW_TOKENS - 1) > 1.1 * steps


@pytest.mark.parametrize("penalty", PENALISED)
def test_penalties(server, plain, prompts, penalty):
    wanted = PENALISED[penalty]
    answers = many(server, prompts[:8], **wanted)
    assert output_ids(answers) == outputs(plain, prompts[:8], **wanted)
    assert_drafted(server, answers)


def test_streamed_pieces_are_the_whole_answer(server, plain, prompts):
    whole = greedy(plain, prompts[0])

    def in_pieces() -> bool:
        *pieces, last = server.stream(prompts[0], temperature=0, max_new_tokens=NEW_TOKENS)
        assert last["output_ids"] == whole["output_ids"] and last["text"] == whole["text"]
        assert all(last["text"].startswith(piece["text"].rstrip("\ufffd")) for piece in pieces)
        return bool(pieces)

    mostly(in_pieces, "answers in more than one piece")  # pieces that nobody has sent yet become one


@ONLY_GRPC
def test_a_stream_interval_hides_short_and_long_steps(server, prompts):
    """Each message but the first and the last has at least so many tokens (docs/security.md)."""
    # Many steps lie between two messages, so that a busy server has sent one before the next is there.
    interval, new_tokens = 40, 200
    asked = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, "stream_interval": interval}
    # SGLang 0.5.17 sends at certain lengths, which a step of several tokens may pass.
    least = 4 if Version(INSTALLED) >= Version("0.5.22") else 2

    def in_messages() -> bool:
        lengths = [len(message["output_ids"]) for message in server.stream(prompts[0], **asked)]
        assert lengths[-1] == new_tokens
        assert all(after - before >= interval for before, after in zip(lengths, lengths[1:-1], strict=False))
        return lengths[0] == 1 and len(lengths) >= least

    mostly(in_messages, "a first token, and the rest piecemeal")


@ONLY_GRPC
def test_weights_may_be_updated_while_it_serves(method, server, spelling_model, prompts):
    """To the same ones, so that the answer is the same."""
    if method.name == "EAGLE3":
        pytest.skip("SGLang loads the target's weights into the head too, and ends")
    asked = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    before = server.generate(prompts[1], **asked)["output_ids"]
    update = {"model_path": str(spelling_model)}
    done = requests.post(server.url + "/update_weights_from_disk", json=update, timeout=300)
    assert done.ok and done.json()["success"], done.text
    assert server.generate(prompts[1], **asked)["output_ids"] == before


def test_chat_completions_stream(server, plain):
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "name three colours."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    path = "/v1/chat/completions"
    whole = requests.post(plain.url + path, json=body, timeout=300).json()["choices"][0]["message"]["content"]
    with requests.post(server.url + path, json=body | {"stream": True}, stream=True, timeout=300) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith(b"data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    assert "".join(deltas) == whole != ""


def test_an_answer_says_what_its_steps_verified(server, prompts):
    """The width of a step varies, and SGLang counts the widest."""
    wanted = {"custom_params": {"specstore": {"sources": True}}}
    drafted = 0
    for ids in prompts[:4]:
        whole = greedy(server, ids, **wanted)
        *pieces, last = server.stream(ids, temperature=0, max_new_tokens=NEW_TOKENS, **wanted)
        for answer in (whole, last):
            info, tokens = answer["meta_info"], len(answer["output_ids"])
            told = info["specstore"]
            assert told["steps"] == info["spec_verify_ct"]
            assert sum(told["accepted"].values()) + told["steps"] + 1 >= tokens == len(told["sources"])
            # SGLang takes a run's last token for the target's own, though an answer may end with a drafted one.
            assert tokens - told["sources"].count("target") <= info["spec_num_correct_drafts"] + 1
            assert tokens - told["sources"].count("target") == sum(told["accepted"].values())
            assert set(told["sources"]) - {"target"} <= set(told["accepted"]) <= set(told["drafted"])
            assert info["spec_num_proposed_drafts"] == sum(told["drafted"].values())
            drafted += info["spec_num_proposed_drafts"]
        assert not any("specstore" in piece["meta_info"] for piece in pieces)
    assert drafted or is_adaptive(server)


@ONLY_EMBEDDED
@pytest.mark.skipif(Version(INSTALLED) < Version("0.5.19"), reason="SGLang 0.5.17 does not show them there")
def test_the_openai_endpoints_count_what_was_verified(server):
    body = {"model": "default", "prompt": "why", "max_tokens": 24, "return_spec_tokens_details": True}
    body |= {"ignore_eos": True}  # an answer of one token has no steps
    for _ in range(2):  # the live tier drafts what was said
        answer = requests.post(server.url + "/v1/completions", json=body, timeout=300).json()
    details = answer["sglext"]["spec_tokens_details"]
    correct, drafted = details["spec_num_correct_drafts"], details["spec_num_proposed_drafts"]
    assert 0 <= correct <= drafted > 0
    assert details["spec_accept_rate"] == pytest.approx(correct / drafted)


def test_several_answers_to_one_prompt(server, plain, prompts):
    alone = greedy(plain, prompts[1])["output_ids"]
    answers = greedy(server, prompts[1], n=3)
    assert output_ids(answers) == [alone] * 3
    assert_drafted(server, answers)
    sampled = server.generate(prompts[1], n=3, temperature=1.0, max_new_tokens=NEW_TOKENS)
    assert len({tuple(answer["output_ids"]) for answer in sampled}) > 1


def test_logprobs(server, plain, prompts):
    wanted = {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0}
    asked = {"top": wanted, "ignore_eos": True}
    answer = greedy(server, prompts[2], **asked)
    assert_drafted(server, [answer])
    ours, theirs = answer["meta_info"], greedy(plain, prompts[2], **asked)["meta_info"]
    for field in ("input_token_logprobs", "output_token_logprobs"):
        assert [token for _, token, _ in ours[field]] == [token for _, token, _ in theirs[field]]
        pairs = zip(ours[field], theirs[field], strict=True)
        assert all(a == b or a == pytest.approx(b, abs=2e-3) for (a, *_), (b, *_) in pairs)
    assert len(ours["output_top_logprobs"]) == len(theirs["output_top_logprobs"]) == NEW_TOKENS
    for ranked, expected in zip(ours["output_top_logprobs"], theirs["output_top_logprobs"], strict=True):
        assert [value for value, *_ in ranked] == pytest.approx([value for value, *_ in expected], abs=2e-3)


def test_json_schema(server, plain, prompts):
    for ids in prompts[:3]:
        ours, theirs = greedy(server, ids, **CONSTRAINED), greedy(plain, ids, **CONSTRAINED)
        assert ours["text"] == theirs["text"]
        assert set(json.loads(ours["text"])) == {"name", "age"}
        assert_drafted(server, [ours])


def test_chunked_prefill_and_the_radix_cache(server, plain, prompts):
    long_ids = [token for row in prompts[3:7] for token in row][:400]
    expected = greedy(plain, long_ids)["output_ids"]
    first = greedy(server, long_ids)
    again = greedy(server, long_ids)
    assert first["output_ids"] == again["output_ids"] == expected
    assert again["meta_info"]["cached_tokens"] > 300
    shared_prefix = greedy(server, long_ids[:300])
    assert shared_prefix["meta_info"]["cached_tokens"] > 200
    assert shared_prefix["output_ids"] == greedy(plain, long_ids[:300])["output_ids"]
    assert_drafted(server, [first, again, shared_prefix])


def test_a_header_names_the_tenant(method, server, plain):
    """The text does not repeat itself: what is drafted of it, and what is cached, comes from who has read it. Over gRPC the datastore is
    that of all methods' servers, and may be late."""
    prompt = [4 + i * i % 29 for i in range(40)]
    wanted = {"frequency_penalty": 0.5, "max_new_tokens": ANSWER, "ignore_eos": True}
    expected = greedy(plain, prompt, **wanted)["output_ids"]

    def ask(tenant: str) -> tuple[int, int]:
        answer = greedy(server, prompt, headers={TENANT_HEADER: f"{method.name}-{tenant}"}, **wanted)
        assert answer["output_ids"] == expected
        info = answer["meta_info"]
        return info["specstore"]["accepted"].get("live", 0), info["cached_tokens"]

    assert ask("reader") == (0, 0)
    live, cached = ask("reader")
    assert cached > 0 and (live > MOST or is_adaptive(server)), UNDRAFTED
    assert ask("stranger") == (0, 0)


def test_a_session_belongs_to_the_tenant_that_opened_it(server, prompts):
    """SGLang's own sessions, whose requests go on with the text of earlier ones."""

    def call(path: str, tenant: str, body: dict) -> requests.Response:
        return requests.post(server.url + path, json=body, headers={TENANT_HEADER: tenant}, timeout=60)

    def talk(tenant: str, rid: str, after: str | None) -> requests.Response:
        sampling = {"temperature": 0, "max_new_tokens": 8}
        session = {"id": "s1", "rid": after}
        body = {
            "rid": rid,
            "input_ids": prompts[0][:20],
            "sampling_params": sampling,
            "session_params": session,
        }
        return call("/generate", tenant, body)

    opened = call("/open_session", "alice", {"session_id": "s1", "capacity_of_str_len": 10000})
    assert opened.ok and opened.json() == "s1"
    assert talk("alice", "first", None).json()["meta_info"]["prompt_tokens"] == 20
    assert talk("alice", "second", "first").json()["meta_info"]["prompt_tokens"] == 48
    for name in ("s1", "5:alice:s1"):
        read = talk("eve", f"read {name}", "first")
        assert read.status_code == 400 and "does not exist" in read.text
    call("/close_session", "eve", {"session_id": "s1"})
    assert talk("alice", "third", "second").ok
    assert call("/open_session", "eve", {"session_id": "s1", "capacity_of_str_len": 10000}).json() == "s1"
    call("/close_session", "eve", {"session_id": "s1"})
    call("/close_session", "alice", {"session_id": "s1"})


def test_a_client_cannot_name_another_tenant_than_its_header(server, prompts):
    body = {"specstore": {"tenant": "own"}}
    with pytest.raises(requests.HTTPError, match="400"):
        greedy(server, prompts[0], custom_params=body, headers={TENANT_HEADER: "other"})
    answer = requests.post(
        server.url + "/v1/completions",
        json={"model": "m", "prompt": [5, 6, 7], "max_tokens": 4, "custom_params": body},
        headers={TENANT_HEADER: "other"},
        timeout=60,
    )
    assert answer.status_code == 400 and "custom_params.specstore.tenant" in answer.text


def test_flush_cache(server, prompts):
    before = greedy(server, prompts[3])
    # The scheduler may not have left the answered request's last step yet: without a time it refuses.
    flushed = requests.post(server.url + "/flush_cache", params={"timeout": 30}, timeout=60)
    assert flushed.status_code == 200, flushed.text
    after = greedy(server, prompts[3])
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["cached_tokens"] == 0


LONG_ANSWER = {"temperature": 0, "frequency_penalty": 0.2, "max_new_tokens": 800, "ignore_eos": True}


def test_an_aborted_request_leaves_the_others_alone(server, plain, prompts):
    expected = outputs(plain, [prompts[4]], max_new_tokens=120) * 2
    numbers = itertools.count()

    def aborted() -> bool:
        others = pool.submit(outputs, server, [prompts[4]] * 2, max_new_tokens=120)
        reason = _reason_of_an_aborted(server, prompts[5], f"to-be-aborted-{next(numbers)}")
        assert others.result() == expected
        return reason == "abort"

    with ThreadPoolExecutor(1) as pool:
        mostly(aborted, "aborts before the answer was whole")


def _reason_of_an_aborted(server: Endpoint, ids: list[int], rid: str) -> str:
    """Why its answer ends, which is aborted after its first piece."""
    body = {"rid": rid, "input_ids": ids, "sampling_params": LONG_ANSWER, "stream": True}
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=300) as response:
        lines = filter(None, response.iter_lines())
        next(lines)
        requests.post(server.url + "/abort_request", json={"rid": rid}, timeout=60)
        *_, last, done = lines
    assert done == b"data: [DONE]"
    return json.loads(last[6:])["meta_info"]["finish_reason"]["type"]


def test_a_client_that_hangs_up(server, prompts):
    stream = server.stream(prompts[5], **LONG_ANSWER)
    next(stream)
    stream.close()
    eventually(lambda: metric(server.url, "sglang:num_running_reqs") == 0, "it is still running", 60)


# Never ends early, but may for all the scheduler knows: it admits more of them than fit. No penalties: stock SGLang samples
# the first token after a retraction without them.
UNENDING = {"max_new_tokens": 300, "logit_bias": {"1": -99.0}}


@ONLY_EMBEDDED
def test_retracted_requests_go_on_where_they_were(server, plain, prompts):
    asked = [ids[:20] for ids in prompts[:16]]
    expected = outputs(plain, asked, 16, **UNENDING)

    def retracted() -> float:
        return metric(server.url, "sglang:num_retracted_requests_total")

    before = retracted()
    answers = greedy(server, asked, **UNENDING)  # in one request, so that all of them run at once
    assert output_ids(answers) == expected
    assert retracted() > before, "no request was retracted: this shows nothing"
    assert_drafted(server, answers)


@ONLY_GRPC
def test_no_request_leaves_a_session(server, datastore, prompts):
    """Neither those of the tests before, constrained ones apart, nor one that ends at prefill."""
    greedy(server, prompts[0], max_new_tokens=1)
    assert requests.get(server.url + "/health_generate", timeout=60).status_code == 200
    eventually(lambda: datastore.sessions() == 0, "sessions are left", ENDED_SECONDS)


def test_requests_of_all_kinds_in_one_batch(server, plain, prompts):
    """Chunked, constrained, penalised, stopped, short and plain greedy requests decoded together."""
    kinds = [
        (prompts[6] + prompts[7], {}),
        (prompts[0], CONSTRAINED),
        (prompts[1], {"stop": ["a", "."]}),
        (prompts[2], {"max_new_tokens": 1}),
        *((prompts[3], wanted) for wanted in PENALISED.values()),
    ]
    expected = [greedy(plain, ids, **wishes)["output_ids"] for ids, wishes in kinds]
    with ThreadPoolExecutor(2 * len(kinds)) as pool:
        noise = pool.submit(server.generate, prompts[8], n=4, temperature=1.0, max_new_tokens=NEW_TOKENS)
        answers = list(pool.map(lambda kind: greedy(server, kind[0], **kind[1]), kinds * 2))
        noise.result()
    assert output_ids(answers) == expected * 2
    assert_drafted(server, [answer for answer in answers if len(answer["output_ids"]) > 1])


@ONLY_GRPC
def test_no_constrained_request_leaves_a_session(server, datastore, prompts):
    outputs(server, prompts[:3], 1, **CONSTRAINED)
    eventually(lambda: datastore.sessions() == 0, "sessions are left", ENDED_SECONDS)


def test_metrics(server, prompts):
    def accepts() -> bool:
        outputs(server, prompts[:4], ignore_eos=True)
        return metric(server.url, "sglang:spec_accept_length") > 1

    eventually(accepts, "no accepted length is counted", 60)  # SGLang writes it every 40 decode steps
    # Counted after the answers were sent.
    eventually(lambda: metric(server.url, "sglang:generation_tokens_total") > 0, "no tokens are counted", 60)


def test_the_serving_benchmark_sees_where_the_time_goes(server, prompts):
    group = [Request("any", ids) for ids in prompts[:3]]
    width = server.spec.nodes + 1
    # On SGLang 0.5.17 some steps had three: why is not known.
    most = 2 if Version(INSTALLED) > Version("0.5.17") else 4

    def goes_where_it_should() -> bool:
        record = measure(server, group, 2, NEW_TOKENS, Case("any", {}))
        assert record["decoded"] == sum(len(output) - 1 for output in record["outputs"]) > 0
        phases = record["phases"]
        assert set(phases) == {*PHASES, RETRIEVE}
        assert phases["verify"] > 0 and phases["draft"] >= phases[RETRIEVE] > 0
        rows = {rows for _, rows, *_ in record["cells"]}
        assert rows <= set(range(1, width + 1)) and (rows == {width} or is_adaptive(server))
        assert {batch for batch, *_ in record["cells"]} <= {1, 2, most}
        shares = breakdown([record])
        likely = all(0 < shares[part] < 1 for part in ("forward", "retrieval", "rest"))
        return likely and phases["forward"] > phases["verify"]

    mostly(goes_where_it_should, "likely shares of the time")  # a stall in one phase changes the order
