"""What changes the target's choice: biases, penalties, processors, and sampled requests beside it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from tests.conformance.request_cases.asking import NEW_TOKENS, Ask, Client, brief, case

BATCH = 8


def _alone_and_together(client: Client, asks: dict[str, Ask]) -> Any:
    alone, together = client.briefs(asks, 1), client.briefs(asks, BATCH)
    for name in asks:
        assert alone[name]["ids"] == together[name]["ids"], name
    return together


def _common(client: Client, ids: list[int]) -> int:
    """The token that an answer has most often."""
    return Counter(client.learned(ids, ignore_eos=True)["output_ids"]).most_common(1)[0][0]


@case()
def biases_of_one_batch(client: Client) -> Any:
    """Requests of one batch ban or favour tokens of their own: no accepted draft has a banned one (sglang#10617)."""
    ids = client.model.texts[0]
    common = _common(client, ids)
    tokens = client.greedy(ids, ignore_eos=True)["output_ids"]
    wishes: dict[str, dict] = {
        "none": {},
        "the commonest": {"logit_bias": {str(common): -100}},
        "two": {"logit_bias": {str(token): -100 for token in tokens[:4:3]}},
        "favoured": {"logit_bias": {str(tokens[1]): 4.0}},
        "all": {"logit_bias": {str(token): -100 for token in set(tokens)}},
        "least probability": {"min_p": 0.2},
    }
    answers = _alone_and_together(
        client, {name: (ids, wish | {"ignore_eos": True}) for name, wish in wishes.items()}
    )
    assert common not in answers["the commonest"]["ids"] and not set(tokens) & set(answers["all"]["ids"])
    body = {"model": "m", "prompt": ids, "max_tokens": 24, "temperature": 0, **wishes["the commonest"]}
    return answers | {"completions": client.told("/v1/completions", body)["choices"][0]["text"]}


@case()
def penalties_of_one_batch(client: Client) -> Any:
    """Requests of one batch have penalties of their own, applied at each accepted token (vllm#18902, sglang#28180)."""
    ids = client.model.texts[1]
    client.learned(ids, ignore_eos=True)
    # None with a repetition penalty and another: plain decoding's order of the two is chance (docs/settings.md).
    wishes: list[dict] = [
        {},
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8},
        {"frequency_penalty": 0.3, "presence_penalty": 0.3},
        {"repetition_penalty": 1.2, "logit_bias": {"30": 3.0}},
    ]
    asks = {json.dumps(wish): (ids, wish | {"ignore_eos": True}) for wish in wishes}
    return _alone_and_together(client, asks)


@case()
def a_greedy_request_among_sampled_ones(client: Client) -> Any:
    """A greedy answer is the same beside requests that sample, with seeds or without (vllm#9441)."""
    ids = client.model.texts[2]
    sampled = {"temperature": 1.0, "top_p": 0.9, "top_k": 20}
    asks: dict[str, Ask] = {
        f"sampled {seed}": (ids, sampled | {"sampling_seed": seed}) for seed in (None, 1, 2, 2)
    }
    asks |= {"greedy": (ids, {}), "nearly greedy": (ids, {"temperature": 1e-4})}
    answers = client.briefs(asks, BATCH)
    assert all(answer["completion_tokens"] <= NEW_TOKENS for answer in answers.values())
    assert answers["greedy"] == brief(client.greedy(ids)) and answers["nearly greedy"] == answers["greedy"]
    return answers["greedy"]
