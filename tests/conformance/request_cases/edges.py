"""Requests at the edge of what can be asked: the shortest, the longest, the same token over and over, and wrong ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang_patches.host.versions import INSTALLED
from tests.conformance.request_cases.asking import AT_ONCE, Ask, Client, brief, case

PIECE = 8  # wrong requests beside one right one


@case(demo=True)
def the_end_of_the_context(client: Client) -> Any:
    """Prompts of all lengths near the context's end, with a cap and without, some at a time (vllm#53812)."""
    ids = [token for text in client.model.texts for token in text] * 40

    def ask(free: int, cap: int | None) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": cap, "ignore_eos": True}
        prompt = ids[: client.model.context - free]
        response = client.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
        return brief(response.json()) if response.ok else response.status_code

    kinds = [(free, cap) for free in (40, 17, 16, 15, 9, 8, 7, 6, 1, 0, -1) for cap in (30, None)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda kind: ask(*kind), kinds))
    assert sum(isinstance(answer, dict) for answer in answers) > 6
    return answers


@case()
def the_same_token_over_and_over(client: Client) -> Any:
    """Prompts of one or two tokens many times, and of end tokens, end like others (llama.cpp#23268, llama.cpp#25819)."""
    model = client.model
    prompts = {
        "one": [28] * 300,
        "two": [28, 30] * 120,
        "end": [model.eos] * 60,
        "first": [0] * 64,
        "last": [model.vocabulary - 1] * 40,
        "single": [9],
    }
    wish = {"max_new_tokens": 90, "ignore_eos": True}
    return client.briefs({name: (ids, wish) for name, ids in prompts.items()})


@case(demo=True)
def hardly_a_prompt(client: Client) -> Any:
    """Prompts of which little is left. Stock SGLang ends at one without tokens, so none is among them."""
    told: list[Any] = []
    for prompt in ({"text": " "}, {"text": ["x", "y"]}, {"text": []}, {"text": "\n"}, {"text": "\ufeff"}, {}):
        response = client.post(
            "/generate", prompt | {"sampling_params": {"temperature": 0, "max_new_tokens": 6}}
        )
        told.append([response.status_code, brief(response.json()) if response.ok else None])
    for path, prompt in (
        ("/v1/completions", {"prompt": " "}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "."}]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "x"}]}),
    ):
        response = client.post(path, prompt | {"model": "m", "max_tokens": 5, "temperature": 0})
        told.append([response.status_code, response.json()["choices"][0] if response.ok else None])
    return told


@case()
def few_tokens(client: Client) -> Any:
    """Answers of no, one, two and three tokens, asked for in all ways, and beside longer ones. One that wants none has SGLang tell the
    log-probability of one if its prefill shares a batch with one that wants some: those are asked for one at a time."""
    ids = client.model.texts[0]
    asks: dict[str, Ask] = {}
    for count in (0, 1, 2, 3):
        asks[f"{count} alone"] = ids, {"max_new_tokens": count}
        asks[f"{count} twice"] = ids, {"max_new_tokens": count, "n": 2}
        asks[f"{count} grammar"] = ids, {"max_new_tokens": count, "regex": "abcdef"}
        top = {"return_logprob": True, "logprob_start_len": 0}
        asks[f"{count} logprobs"] = ids, {"max_new_tokens": count, "top": top}
    mixed: dict[str, Ask] = {str(i): (ids, {"max_new_tokens": n}) for i, n in enumerate((0, 1, 2, 30, 0, 1))}
    return [client.briefs(asks, 1), client.briefs(mixed, len(mixed))]


# What makes no sense: fields of the request, and `sampling_params` among them. What is refused by a method alone stands in
# `test_client_values.py`.
WRONG: list[dict[str, Any]] = [
    {"sampling_params": sampling}
    for sampling in (
        {"stop_regex": "("},
        {"stop": 5},
        {"stop_token_ids": ["a"]},
        {"stop_token_ids": [10**9]},
        {"logit_bias": {"100000": 1.0}},
        {"logit_bias": {"-1": 1.0}},
        {"logit_bias": {"x": 1.0}},
        {"regex": "("},
        {"json_schema": "{"},
        {"ebnf": "root ::="},
        {"regex": "a", "ebnf": 'root ::= "a"'},
        {"max_new_tokens": -1},
        {"max_new_tokens": 10**9, "stop": ["a", "e"]},
        {"max_new_tokens": "8"},
        {"min_new_tokens": 5, "max_new_tokens": 3},
        {"temperature": -1},
        {"temperature": "0"},
        {"top_k": 0},
        {"top_p": 0},
        {"n": 0},
        {"frequency_penalty": 9},
        {"repetition_penalty": 0},
        {"watermark": {"enabled": True}},
        {"custom_params": {"thinking_budget": -3}},
    )
] + [
    {"return_logprob": True, "token_ids_logprob": []},
    {"return_logprob": True, "logprob_start_len": 10**6},
    {"lora_path": "nobody"},
    {"session_params": {"id": "nobody"}},
    {"image_data": "x"},
]


@case(sharp=True)
def wrong_values(client: Client) -> Any:
    """Values that make no sense are answered as plain decoding answers them, and a request beside them goes on."""
    ids = client.model.texts[0]
    expected = brief(client.learned(ids, ignore_eos=True))

    def ask(fields: dict[str, Any]) -> list[Any]:
        sampling = {"temperature": 0, "max_new_tokens": 4, **fields.get("sampling_params", {})}
        response = client.post("/generate", {"input_ids": ids[:8], **fields, "sampling_params": sampling})
        # SGLang 0.5.17 answers some of them 500, which the plugin's checks answer 400.
        status = 400 if INSTALLED == "0.5.17" and response.status_code == 500 else response.status_code
        return [status, response.json()["text"] if response.ok else None]

    told: list[Any] = []
    with ThreadPoolExecutor(PIECE) as pool:
        for begin in range(0, len(WRONG), PIECE):
            beside = pool.submit(client.greedy, ids, ignore_eos=True)
            told += pool.map(ask, WRONG[begin : begin + PIECE])
            assert brief(beside.result()) == expected
    return told


# Of `custom_params.specstore`, whose types a method checks: plain decoding knows nothing of it.
WISHES = ("specstore", 5, ["x"], {"conversation": {"a": 1}}, {"publish": "no"}, {"unknown": True})
NO_WISHES = (None, {}, {"conversation": None, "sources": None, "publish": None})


@case()
def wrong_wishes(client: Client) -> Any:
    """Wishes of a wrong type are refused by a method and unseen by plain decoding; empty ones change nothing."""
    ids = client.model.texts[0]
    speculated = "spec_verify_ct" in client.learned(ids)["meta_info"]
    for wish in WISHES:
        sampling = {"temperature": 0, "max_new_tokens": 6, "custom_params": {"specstore": wish}}
        response = client.post("/generate", {"input_ids": ids, "sampling_params": sampling})
        assert response.status_code == (400 if speculated else 200), (wish, response.text[:300])
    return client.briefs({str(wish): (ids, {"custom_params": {"specstore": wish}}) for wish in NO_WISHES})
