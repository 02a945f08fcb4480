"""Prefill and decode on instances of their own (`--disaggregation-mode`), behind SGLang's router, another tenant of the same datastore.

Requests with a logit bias or parameters of ours go to the instances: the router passes neither on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conformance.conftest import (
    DRAFTING,
    ENDED_SECONDS,
    FLAGS,
    STATIC,
    TENANT_HEADER,
    assert_drafted,
)
from tests.conformance.test_features import (
    ANSWER,
    CONSTRAINED,
    MOST,
    NEW_TOKENS,
    ONLY_GRPC,
    UNDRAFTED,
    UNENDING,
    greedy,
    many,
    output_ids,
    outputs,
)
from tests.conformance.test_predictions import post, predicted, said
from tests.support.servers.engine import ServerSpec
from tests.support.servers.forked import SglangServer, Split, running_split
from tests.support.servers.metrics import metric
from tests.waiting import eventually, mostly

# Too small for all that is asked at once: requests are retracted on the decode instance.
CACHE = 2048


@pytest.fixture(scope="session")
def stack(method, spelling_model, draft_model, datastore, method_environment, logs) -> Iterator[Split]:
    environment = {"SPECSTORE_ENDPOINT": datastore.endpoint, "SPECSTORE_TENANT": f"another {method.name}"}
    environment |= {"SPECSTORE_REQUEST_TENANT": f"header:{TENANT_HEADER}"} | method_environment
    spec = ServerSpec(
        f"{method.name}-split",
        spelling_model,
        method.name,
        dtype="float32",
        nodes=7,
        draft=draft_model,
        flags=(*FLAGS, *DRAFTING, *STATIC, "--num-reserved-decode-tokens", "16"),
        environment=environment,
        max_total_tokens=CACHE,
    )
    with running_split(spec, logs) as stack:
        yield stack


def test_greedy_output_is_plain_decodings(stack, plain, prompts):
    answers = many(stack, prompts, ignore_eos=True)
    assert output_ids(answers) == outputs(plain, prompts, ignore_eos=True)
    assert_drafted(stack.decodes[0], answers)
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert len(answers) * (NEW_TOKENS - 1) > 1.1 * steps, "no draft was accepted"


def test_retracted_requests_go_on_where_they_were(stack, plain, prompts):
    asked = [ids[:20] for ids in prompts[:16]]
    answers = stack.generate_at(0, asked, temperature=0, **UNENDING)  # at once
    assert output_ids(answers) == outputs(plain, asked, 16, **UNENDING)
    retracted = metric(stack.decodes[0].url, "sglang:num_retracted_requests_total")
    assert retracted > 0, "no request was retracted: this shows nothing"
    assert_drafted(stack.decodes[0], answers)


def test_streamed_constrained_sampled_and_short_requests(stack, plain, prompts):
    def streamed() -> dict:
        *_, last = stack.stream(prompts[0], temperature=0, max_new_tokens=NEW_TOKENS)
        return last

    with ThreadPoolExecutor(4) as pool:
        stream = pool.submit(streamed)
        constrained = pool.submit(greedy, stack, prompts[1], **CONSTRAINED)
        short = pool.submit(greedy, stack, prompts[2], max_new_tokens=1)
        sampled = pool.submit(
            stack.generate, prompts[3], temperature=0.8, top_p=0.9, max_new_tokens=NEW_TOKENS
        )
    assert stream.result()["output_ids"] == greedy(plain, prompts[0])["output_ids"]
    assert constrained.result()["text"] == greedy(plain, prompts[1], **CONSTRAINED)["text"]
    assert short.result()["output_ids"] == greedy(plain, prompts[2], max_new_tokens=1)["output_ids"]
    assert sampled.result()["output_ids"]
    assert_drafted(stack.decodes[0], [of.result() for of in (stream, constrained, sampled)])


@ONLY_GRPC
def test_text_is_drafted_for_its_own_tenant_alone(method, server, stack, plain):
    """The text does not repeat itself: what the live tier drafts of it comes from who has read it, the split. The other tenant, which has
    read nothing, may be answered late, and so asks again."""
    known = _known_to_live(plain, [2 + i * i % 37 for i in range(9)])
    newcomer = functools.partial(server.generate, headers={TENANT_HEADER: f"{method.name}-newcomer"})
    assert known(newcomer, publish=False) == 0
    mostly(lambda: known(functools.partial(stack.generate_at, 0)) > MOST, UNDRAFTED)
    assert [known(newcomer, publish=False) for _ in range(3)] == [0, 0, 0]


def test_a_header_names_the_tenant_to_both_instances(method, stack, plain):
    """Through the router, on a prompt that no other test has."""
    known = _known_to_live(plain, [3 + i * i % 31 for i in range(9)])

    def of_tenant(tenant: str) -> int:
        return known(functools.partial(stack.generate, headers={TENANT_HEADER: f"{method.name}-{tenant}"}))

    assert of_tenant("own") == 0
    mostly(lambda: of_tenant("own") > MOST, UNDRAFTED)  # a draft may be late
    assert of_tenant("other") == 0


def test_tenants_share_no_prefix(method, stack, prompts):
    def cached(tenant: str) -> int:
        headers = {TENANT_HEADER: f"{method.name}-{tenant}"}
        answer = stack.generate(prompts[4], headers=headers, temperature=0, max_new_tokens=4)
        return answer["meta_info"]["cached_tokens"]

    assert cached("prefix") == 0
    assert cached("prefix") > 0
    assert cached("another prefix") == 0


def test_a_reference_drafts_on_the_decode_instance(stack, plain, prompts):
    asked = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    expected = plain.generate(prompts[5], **asked)
    wanted = asked | {"custom_params": {"specstore": {"reference": expected["text"]}}}
    answer, routed = stack.generate_at(0, prompts[5], **wanted), stack.generate(prompts[5], **wanted)
    assert answer["output_ids"] == routed["output_ids"] == expected["output_ids"]
    assert answer["meta_info"]["specstore"]["prediction"]["accepted"] > 0
    assert "prediction" not in routed["meta_info"]["specstore"]


def test_a_prediction_ends_at_the_router(stack, plain):
    asked = post(plain)
    answer = post(stack, **predicted(said(asked)))
    assert said(answer) == said(asked) and not answer["usage"].get("completion_tokens_details")


def test_only_decode_instances_check_the_memory_for_verification(stack):
    def checked(server: SglangServer) -> bool:
        return "the logits of a step with" in server.log.read_text()

    assert all(map(checked, stack.decodes)) and not any(map(checked, stack.prefills))


def _known_to_live(plain: SglangServer, prompt: list[int]) -> Callable[..., int]:
    """Counts the tokens of the prompt's answer that the live tier has proposed to a server. Each answer is published unless `publish` is
    false: one that ends while no stream is open is not learned."""
    wanted = {"temperature": 0, "frequency_penalty": 0.5, "max_new_tokens": ANSWER, "ignore_eos": True}
    (expected,) = outputs(plain, [prompt], **wanted)

    def known(generate: Callable[..., dict], publish: bool = True) -> int:
        answer = generate(prompt, custom_params={"specstore": {"publish": publish}}, **wanted)
        assert answer["output_ids"] == expected
        return answer["meta_info"]["specstore"]["accepted"].get("live", 0)

    return known


def test_no_request_is_left(stack):
    eventually(lambda: all(_idle(server.url) for server in stack.instances), "requests are left", 60)


def test_no_request_leaves_a_session(stack, datastore):
    eventually(lambda: datastore.sessions() == 0, "sessions are left", ENDED_SECONDS)


def _idle(url: str) -> bool:
    """Whether it runs and holds nothing."""
    return metric(url, "sglang:num_running_reqs") == 0 and metric(url, "sglang:num_used_tokens") == 0
