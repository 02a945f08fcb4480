"""Structured output: every kind of grammar, in all ways an answer may be asked for and ended."""

from __future__ import annotations

import json
from typing import Any

from tests.conformance.request_cases.asking import Ask, Client, case

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "pet": {"type": "string", "enum": ["cat", "dog", "hen"]},
    },
    "required": ["name", "age", "pet"],
    "additionalProperties": False,
}
FIXED = {  # nearly all of it can be drafted
    "type": "object",
    "properties": {
        "said": {"const": "what no draft can miss, as it is always the same"},
        "true": {"type": "boolean"},
    },
    "required": ["said", "true"],
    "additionalProperties": False,
}
CODES = {"regex": "([0-9]{3}-){3}[0-9]{3}"}
SENTENCE = {"ebnf": 'root ::= "it is " time " now, and soon " time "."\ntime ::= [0-9] [0-9]?'}
WORDS = {"regex": "(yes|no|maybe)( (yes|no|maybe)){5,9}"}
OBJECT, CONSTANT = {"json_schema": json.dumps(SCHEMA)}, {"json_schema": json.dumps(FIXED)}
TAG = {
    "type": "triggered_tags",
    "triggers": ["{pet:"],
    "tags": [{"begin": "{pet:", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "}"}],
    "at_least_one": True,
}
TAGGED = {"structural_tag": json.dumps({"type": "structural_tag", "format": TAG})}
GRAMMARS = {
    "object": OBJECT,
    "constant": CONSTANT,
    "codes": CODES,
    "sentence": SENTENCE,
    "words": WORDS,
    "tag": TAGGED,
}
SCRIPTS = {"regex": "(日本|中文|😀){2,4}"}
LONG = 80
BATCH = 8


@case(sharp=True)
def grammars_of_one_batch(client: Client) -> Any:
    """Constrained requests of all kinds decode together, others beside them, each as alone (vllm#52620, sglang#20148)."""
    kinds = {
        "plain": {},
        "penalty": {"frequency_penalty": 0.5},
        "stopped": OBJECT | {"stop": ["p", "}"]},
        **GRAMMARS,
    }
    texts = client.model.texts
    asks: dict[str, Ask] = {
        name: (texts[i % len(texts)], {"max_new_tokens": LONG, **kind})
        for i, (name, kind) in enumerate(kinds.items())
    }
    first, again = client.briefs(asks, BATCH), client.briefs(asks, BATCH)
    assert first == again
    assert json.loads(first["object"]["text"]).keys() == SCHEMA["properties"].keys()
    assert json.loads(first["constant"]["text"])["said"] == FIXED["properties"]["said"]["const"]
    return first


@case()
def grammars_of_all_kinds(client: Client) -> Any:
    """A constrained answer that is cut off, stopped, streamed, given twice, held open, with log-probabilities (sglang#17576,
    sglang#9187, sglang#15050)."""
    first, second, *_ = client.model.texts
    whole = client.briefs(
        {name: (first, {"max_new_tokens": LONG, **kind}) for name, kind in GRAMMARS.items()}
    )
    asks: dict[str, Ask] = {}
    for name, kind in GRAMMARS.items():
        length = whole[name]["completion_tokens"]
        ways: dict[str, dict] = {
            "again": {},
            **{f"cap {cap}": {"max_new_tokens": cap} for cap in (length - 1, length, length + 1)},
            "logprobs": {"max_new_tokens": 30, "top": {"return_logprob": True, "top_logprobs_num": 1}},
            "two": {"max_new_tokens": 20, "n": 2},
            "stopped": {"stop": ["a", "1"]},
            "least": {"min_new_tokens": 10},
            "no end": {"max_new_tokens": 30, "ignore_eos": True},
        }
        asks |= {
            f"{name} {way}": (first, {"max_new_tokens": LONG, **kind, **wish}) for way, wish in ways.items()
        }
        asks[f"{name} second"] = second, {"max_new_tokens": LONG, **kind}
    answers = client.briefs(asks)
    for name, kind in GRAMMARS.items():
        assert answers[f"{name} again"] == whole[name], name
        *_, last = client.stream(first, temperature=0, max_new_tokens=LONG, **kind)
        assert last["text"] == whole[name]["text"], name
        held_open = answers[f"{name} no end"]["ids"]
        if (
            client.model.eos in held_open
        ):  # plain decoding says one token more, behind the grammar's end (docs/settings.md)
            answers[f"{name} no end"] = held_open[: held_open.index(client.model.eos) + 1]
    assert whole["tag"]["text"].startswith("{pet:{")
    beyond = {"temperature": 0, "min_new_tokens": 60, "max_new_tokens": LONG, **CODES}  # than the grammar has
    status = client.post("/generate", {"input_ids": first, "sampling_params": beyond}).status_code
    return [answers, status]


@case(demo=True)
def a_grammar_of_many_scripts(client: Client) -> Any:
    """A grammar's characters that are several tokens each."""
    texts = client.model.texts
    return client.briefs({str(i): (ids, {"max_new_tokens": LONG, **SCRIPTS}) for i, ids in enumerate(texts)})


@case()
def a_response_format(client: Client) -> Any:
    """The chat endpoint's formats, whole and streamed (vllm#9423, sglang#25388)."""
    schema = {"name": "pet", "schema": SCHEMA, "strict": True}
    told = {}
    for wanted in ({"type": "json_object"}, {"type": "json_schema", "json_schema": schema}):
        messages = [{"role": "user", "content": "name a pet."}]
        body = {
            "model": "m",
            "messages": messages,
            "temperature": 0,
            "max_tokens": LONG,
            "response_format": wanted,
        }
        choice = client.told("/v1/chat/completions", body)["choices"][0]
        pieces = [
            c["delta"].get("content")
            for event in client.events("/v1/chat/completions", body)
            for c in event["choices"]
        ]
        assert "".join(filter(None, pieces)) == choice["message"]["content"]
        told[wanted["type"]] = [choice["message"]["content"], choice["finish_reason"]]
    return told
