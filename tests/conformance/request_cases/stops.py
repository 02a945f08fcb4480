"""What ends an answer: strings, patterns, tokens, the end token, the cap, and several of them in one accepted run."""

from __future__ import annotations

import re
from typing import Any

from tests.conformance.request_cases.asking import NEW_TOKENS, Ask, Client, case

TEXTS = {"return_logprob": True, "return_text_in_logprobs": True}


def _spelled(client: Client, ids: list[int]) -> tuple[list[int], list[str]]:
    """A varied answer's tokens, and the text of each; a server that speculates has drafts for it."""
    varied = client.model.varied
    whole = client.learned(ids, **varied, top=dict(TEXTS))
    return whole["output_ids"], [text for _, _, text in whole["meta_info"]["output_token_logprobs"]]


def _new_at(tokens: list[int], least: int) -> int:
    """The first place from `least` on whose token is in no earlier one."""
    return next(place for place in range(least, len(tokens)) if tokens[place] not in tokens[:place])


@case(sharp=True)
def several_stop_strings(client: Client) -> Any:
    """Of several stop strings the first in the text counts, wherever it stands in the list (openvino.genai#1676)."""
    varied = client.model.varied
    ids = client.model.texts[0]
    text = client.learned(ids, **varied)["text"]
    stops = {
        "a later one is listed first": [text[24:28], text[8:11]],
        "one begins another": [text[14:22], text[14:17]],
        "one is begun by another": [text[14:17], text[14:22]],
        "longer than a run": [text[3:33]],
        "among strangers": ["?!?!", text[18:21], "\u20ac"],
        "the last character": [text[-1:]],
    }
    whole = client.briefs({name: (ids, varied | {"stop": wanted}) for name, wanted in stops.items()})
    for name, wanted in stops.items():
        assert whole[name]["finish_reason"]["type"] == "stop", name
        assert not any(stop in whole[name]["text"] for stop in wanted), name
        *_, last = client.stream(ids, temperature=0, max_new_tokens=NEW_TOKENS, **varied, stop=wanted)
        assert last["text"] == whole[name]["text"], name
    return whole


@case(sharp=True)
def stops_of_two_kinds(client: Client) -> Any:
    """Two ends of different kinds that lie in one accepted run: the first one ends the answer (sglang#31569, koboldcpp#1276)."""
    varied = client.model.varied
    asks: dict[str, Ask] = {}
    for number, ids in enumerate(client.model.texts[:2]):
        tokens, texts = _spelled(client, ids)
        for place in (_new_at(tokens, 5), _new_at(tokens, 12)):
            early, late = ("".join(texts[i : i + 2]) for i in (place, place + 3))
            kinds: dict[str, dict] = {
                "token, string": {"stop_token_ids": [tokens[place]], "stop": [late]},
                "string, token": {"stop_token_ids": [tokens[place + 3]], "stop": [early]},
                "pattern, string": {"stop_regex": [re.escape(early)], "stop": [late]},
                "string, pattern": {"stop_regex": [re.escape(late)], "stop": [early]},
                "two patterns": {"stop_regex": [re.escape(late), re.escape(early)]},
                "shown": {"stop_token_ids": [tokens[place]], "stop": [late], "no_stop_trim": True},
            }
            asks |= {f"{number} {place + 1} {kind}": (ids, varied | ends) for kind, ends in kinds.items()}
    answers = client.briefs(asks)
    for name, answer in answers.items():
        assert answer["finish_reason"]["type"] == "stop", name
        assert not name.endswith("token, string") or answer["completion_tokens"] == int(name.split()[1])
    return answers


@case(sharp=True)
def a_stop_against_the_cap(client: Client) -> Any:
    """The cap lies just before, at or just behind another end (sglang#31599, sglang#33758)."""
    varied = client.model.varied
    ids = client.model.texts[1]
    tokens, texts = _spelled(client, ids)
    token = tokens[_new_at(tokens, 12)]
    ends = {"string": {"stop": ["".join(texts[12:14])]}, "token": {"stop_token_ids": [token]}}
    whole = client.briefs({kind: (ids, varied | end) for kind, end in ends.items()})
    caps = {
        kind: range(answer["completion_tokens"] - 2, answer["completion_tokens"] + 3)
        for kind, answer in whole.items()
    }
    asks: dict[str, Ask] = {
        f"{kind} {cap}": (ids, varied | ends[kind] | {"max_new_tokens": cap})
        for kind in ends
        for cap in caps[kind]
    }
    return whole | client.briefs(asks)


@case()
def a_stop_string_inside_a_run(client: Client) -> Any:
    """A stop string of any length ends at any token of a run, with log-probabilities up to it (vllm#47616, sglang#25980)."""
    varied = client.model.varied
    asks: dict[str, Ask] = {}
    for number, ids in enumerate(client.model.texts[:3]):
        text = client.learned(ids, **varied)["text"]
        for begin in (3, 11, 24):
            for length in (1, 4, 9):
                for shown in (False, True):
                    wish = varied | {"stop": [text[begin : begin + length]], "no_stop_trim": shown}
                    name = f"{number} {begin} {length} {shown}"
                    asks[name] = ids, wish | {"top": {"return_logprob": True, "top_logprobs_num": 2}}
    return client.briefs(asks)


@case()
def a_stop_pattern(client: Client) -> Any:
    """Patterns that are longer than a run, or anchored at the end of what has been said (sglang#23802)."""
    varied = client.model.varied
    asks: dict[str, Ask] = {}
    for number, ids in enumerate(client.model.texts[:3]):
        client.learned(ids, **varied)
        for pattern in (r"[a-z]{3}", r"\d$", r"[^a]{14}", r"e\b", r"(?i)Q.", r"(?:[a-z ]+\W){2}"):
            asks[f"{number} {pattern}"] = ids, varied | {"stop_regex": pattern}
    return client.briefs(asks)


def _coming_to_an_end(client: Client) -> tuple[list[int], dict[str, Any]]:
    """A prompt, and a bias by which its answer comes upon the end token in its middle."""
    top = {"return_logprob": True, "token_ids_logprob": [client.model.eos]}
    for ids in client.model.texts:
        info = client.greedy(ids, ignore_eos=True, top=dict(top))["meta_info"]
        pairs = zip(info["output_token_logprobs"], info["output_token_ids_logprobs"], strict=True)
        lacks = [said[0] - ended[0][0] for said, ended in pairs]
        least = min(lacks[5:25])
        if least < min(lacks[:5]) - 0.2:
            return ids, {"logit_bias": {str(client.model.eos): round(least + 0.1, 1)}}
    raise AssertionError("no text comes near its end")


@case(sharp=True)
def the_end_token_inside_a_run(client: Client) -> Any:
    """An accepted run holds the end token: what is behind it shows only where the request ignores it (transformers#47912)."""
    ids, bias = _coming_to_an_end(client)
    client.learned(ids, **bias, ignore_eos=True)
    asks: dict[str, Ask] = {
        "ended": (ids, bias),
        "ignored": (ids, bias | {"ignore_eos": True}),
        "not before": (ids, bias | {"min_new_tokens": 30}),
        "as a stop token": (ids, bias | {"stop_token_ids": [client.model.eos]}),
        "shown": (ids, bias | {"no_stop_trim": True, "skip_special_tokens": False}),
        "shown apart": (
            ids,
            bias
            | {"no_stop_trim": True, "skip_special_tokens": False, "spaces_between_special_tokens": False},
        ),
    }
    answers = client.briefs(asks)
    end = answers["ended"]
    assert end["finish_reason"] == {"type": "stop", "matched": client.model.eos}
    assert 5 < end["completion_tokens"] < answers["not before"]["completion_tokens"]
    assert answers["ignored"]["ids"][: len(end["ids"])] == end["ids"]
    return answers


@case(sharp=True)
def a_least_length(client: Client) -> Any:
    """Stop tokens end an answer of the least length and no shorter one; one is the first id beside the vocabulary, as tokenizers with
    padding send it (vllm#41768, vllm#32264)."""
    varied = client.model.varied
    ids = client.model.texts[0]
    tokens = client.learned(ids, **varied)["output_ids"]
    ends = [tokens[2], tokens[9], client.model.vocabulary]
    asks: dict[str, Ask] = {
        f"least {least}": (ids, varied | {"min_new_tokens": least, "stop_token_ids": ends})
        for least in (0, 1, 4, 10, 30)
    }
    asks["beside alone"] = ids, varied | {"min_new_tokens": 3, "stop_token_ids": ends[-1:]}
    asks["string"] = ids, varied | {"min_new_tokens": 12, "stop": [client.greedy(ids, **varied)["text"][4:6]]}
    answers = client.briefs(asks)
    lengths = {least: answers[f"least {least}"]["completion_tokens"] for least in (0, 1, 4, 10, 30)}
    assert lengths[0] <= 3 and all(lengths[least] >= least for least in lengths)
    refused = {"max_new_tokens": 8, "min_new_tokens": 9, "temperature": 0}
    status = client.post("/generate", {"input_ids": ids, "sampling_params": refused}).status_code
    return answers | {"more than the cap": status}
