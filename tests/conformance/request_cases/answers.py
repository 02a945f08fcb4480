"""What comes back beside the tokens: log-probabilities, hidden states, usage, several answers, numbers of speculation."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.conformance.request_cases.asking import NEW_TOKENS, Ask, Client, brief, case, speculates
from tests.support.servers.metrics import metric
from tests.waiting import eventually

BATCH = 6


def _usage(answer: dict[str, Any]) -> dict[str, int]:
    return {
        name: count
        for name, count in answer["usage"].items()
        if name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }


@case(sharp=True)
def usage_in_streams(client: Client) -> Any:
    """Usage rises from piece to piece, never above what was said, and ends with the whole answer's (sglang#39826, vllm#45678)."""
    varied = client.model.varied
    ids = client.model.texts[0]
    text = client.learned(ids, **varied)["text"]
    told = {}
    for name, extra in {"cap": {}, "one": {"max_tokens": 1}, "stop": {"stop": [text[12:15]]}}.items():
        body = {"model": "m", "prompt": ids, "temperature": 0, "max_tokens": NEW_TOKENS, **varied, **extra}
        whole = client.told("/v1/completions", body)
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = client.events("/v1/completions", body | {"stream_options": options})
        counts = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
        assert counts == sorted(counts) and len(counts) > 1, name
        assert _usage(events[-1]) == _usage(whole), name
        said = "".join(choice["text"] for event in events for choice in event["choices"])
        assert said == whole["choices"][0]["text"], name
        told[name] = [_usage(whole), said, whole["choices"][0]["finish_reason"]]
    counts = []
    for piece in client.stream(ids, temperature=0, max_new_tokens=NEW_TOKENS, **varied):
        counts.append(piece["meta_info"]["completion_tokens"])
        assert counts[-1] == len(piece["output_ids"])
    assert counts == sorted(counts) and counts[-1] == NEW_TOKENS
    return told


@case(sharp=True)
def numbers_of_speculation(client: Client) -> Any:
    """Whatever ends an answer, what it and the metrics say of the speculation fits its tokens (sglang#33518, sglang#23530)."""
    varied = client.model.varied
    ids = client.model.texts[1]
    whole = client.learned(ids, **varied)
    asks: dict[str, Ask] = {
        "cap": (ids, varied),
        "two": (ids, varied | {"max_new_tokens": 2}),
        "one": (ids, varied | {"max_new_tokens": 1}),
        "string": (ids, varied | {"stop": [whole["text"][17:20]]}),
        "token": (ids, varied | {"stop_token_ids": whole["output_ids"][20:21]}),
        "grammar": (ids, {"regex": "[0-9]{3}(-[0-9]{3}){2}"}),
        "several": (ids, varied | {"n": 2}),
    }
    answers = client.briefs(asks)  # which looks at each answer's own numbers
    if speculates(whole) and not client.adaptive:

        def is_written() -> bool:  # every 40 steps
            client.greedy(ids, **varied)
            return metric(client.url, "sglang:spec_accept_length") > 1

        eventually(is_written, "no accepted length is written")
        assert 0 < metric(client.url, "sglang:spec_accept_rate") <= 1
    return answers


@case()
def several_answers(client: Client) -> Any:
    """Several answers to a prompt, several prompts in a request, prompts that are said again (vllm#6137)."""
    first, second, third, *_ = client.model.texts
    client.learned(first)
    many = {"temperature": 0, "max_new_tokens": 24, "n": 2}
    several = client.told("/generate", {"input_ids": [first, second, third], "sampling_params": many})
    own = [
        {"temperature": 0, "max_new_tokens": 5},
        {"temperature": 0, "max_new_tokens": 17, "min_new_tokens": 9},
    ]
    apart = client.told("/generate", {"input_ids": [first, second], "sampling_params": own})
    answers = {"three": brief(client.greedy(first, n=3)), "several": brief(several), "own": brief(apart)}
    for echo in (False, True):
        body = {
            "model": "m",
            "prompt": [first, second],
            "n": 2,
            "echo": echo,
            "logprobs": 2,
            "max_tokens": 12,
            "temperature": 0,
        }
        told = client.told("/v1/completions", body)
        choices = [
            [
                choice["text"],
                choice["finish_reason"],
                choice["logprobs"]["tokens"],
                choice["logprobs"]["token_logprobs"],
            ]
            for choice in told["choices"]
        ]
        answers[f"echo {echo}"] = [choices, _usage(told)]
    body = {"model": "m", "prompt": first, "n": 2, "max_tokens": 24, "temperature": 0}
    events = client.events("/v1/completions", body | {"stream_options": {"include_usage": True}})
    streamed = [
        "".join(choice["text"] for event in events for choice in event["choices"] if choice["index"] == index)
        for index in (0, 1)
    ]
    assert streamed == [choice["text"] for choice in client.told("/v1/completions", body)["choices"]]
    return answers | {"usage": _usage(events[-1])}


@case()
def logprobs_of_all_kinds(client: Client) -> Any:
    """A run brings a log-probability of every kind for each of its tokens, also beside requests that want none (sglang#17349,
    sglang#14046, llama.cpp#27196)."""
    kinds: dict[str, dict] = {
        "whole": {
            "top_logprobs_num": 4,
            "logprob_start_len": 0,
            "token_ids_logprob": [5, 9, 2],
            "return_text_in_logprobs": True,
        },
        "answer": {},
        "from the middle": {"logprob_start_len": 7},
        "ranked": {"top_logprobs_num": 2},
        "some": {"token_ids_logprob": [5, 6]},
    }
    asks: dict[str, Ask] = {}
    for number, ids in enumerate(client.model.texts[:2]):
        client.learned(ids)
        asks |= {
            f"{number} {kind}": (ids, {"top": {"return_logprob": True, **top}}) for kind, top in kinds.items()
        }
        asks[f"{number} none"] = ids, {}
    return client.briefs(asks, BATCH)


@case()
def logprobs_in_a_stream(client: Client) -> Any:
    """Pieces of several tokens bring as many log-probabilities; joined, they are the whole answer's (sglang#26778)."""
    ids = client.model.texts[0]
    client.learned(ids)
    body = {
        "input_ids": ids,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS},
    }
    whole = client.told("/generate", body)
    last = client.events("/generate", body)[-1]
    assert _tokens(last) == _tokens(whole)
    body = {"model": "m", "prompt": ids, "temperature": 0, "max_tokens": NEW_TOKENS, "logprobs": 2}
    told = client.told("/v1/completions", body)["choices"][0]["logprobs"]
    pieces = [
        choice["logprobs"] for event in client.events("/v1/completions", body) for choice in event["choices"]
    ]
    assert [token for piece in pieces if piece for token in piece["tokens"]] == told["tokens"]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "name three colours."}],
        "temperature": 0,
        "max_tokens": NEW_TOKENS,
    }
    # SGLang leaves a piece without a text out, and its log-probabilities with it: special tokens have one here.
    body |= {"logprobs": True, "top_logprobs": 2, "skip_special_tokens": False}
    chat = client.told("/v1/chat/completions", body)["choices"][0]
    choices = [choice for event in client.events("/v1/chat/completions", body) for choice in event["choices"]]
    content = [
        one["token"] for choice in choices if choice.get("logprobs") for one in choice["logprobs"]["content"]
    ]
    assert content == [one["token"] for one in chat["logprobs"]["content"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == chat["message"]["content"]
    said = [[one["token"], one["logprob"], len(one["top_logprobs"])] for one in chat["logprobs"]["content"]]
    return [brief(whole), told["tokens"], told["token_logprobs"], said]


def _tokens(answer: dict[str, Any]) -> list[int]:
    return [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]


@case(demo=True)
def hidden_states(client: Client) -> Any:
    """One row a token, and the right token's, also after a stop and in a batch (sglang#26163, sglang#26131)."""
    first, second, third, *_ = client.model.texts
    text = client.learned(first, ignore_eos=True)["text"]
    wish: dict[str, Any] = {"ignore_eos": True, "top": {"return_hidden_states": True}}
    asks: dict[str, Ask] = {
        f"{number} {count}": (ids, wish | {"max_new_tokens": count})
        for number, ids in enumerate((first, second))
        for count in (1, 2, 20)
    }
    asks |= {"stopped": (first, wish | {"stop": [text[20:24]]}), "none": (third, {"ignore_eos": True})}

    def ask(name: str) -> Any:
        ids, wishes = asks[name]
        answer = client.greedy(ids, **wishes)
        return [brief(answer), _sizes(answer["meta_info"].get("hidden_states"))]

    alone = {name: ask(name) for name in asks}
    with ThreadPoolExecutor(BATCH) as pool:
        return [alone, dict(zip(asks, pool.map(ask, asks), strict=True))]


def _sizes(states: Any) -> Any:
    """Of each token's row, a number that another row has not. Of the prompt's rows the last: the others may be cached."""
    if not states or isinstance(states[0], float):
        return states and math.fsum(abs(value) for value in states)
    return [_sizes(part[-1] if isinstance(part[0], list) else part) for part in states]
