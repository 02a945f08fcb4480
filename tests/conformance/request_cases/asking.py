"""How a case asks a server, and what of an answer two servers must have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import requests

from sglang_patches.launch.processes import PROXIES
from tests.support.servers.engine import Endpoint
from tests.waiting import eventually

NEW_TOKENS = 40
AT_ONCE = 3  # requests of a case that run side by side
ASKED = 10  # times, for a draft
TOLERANCE = 1e-3  # of floats, absolute and relative
# Of `meta_info`, beside everything about log-probabilities.
COMPARED = ("finish_reason", "prompt_tokens", "completion_tokens", "reasoning_tokens")


@dataclass(frozen=True)
class Model:
    """What a case knows of the model behind both servers. texts: prompts, as token ids. eos: its end token. context: tokens of the
    longest request."""

    texts: Sequence[list[int]]
    vocabulary: int
    eos: int
    context: int

    @property
    def varied(self) -> dict[str, Any]:
        """Wishes for a long answer that does not say one thing over and over. `ignore_eos` would ignore stop tokens as well."""
        return {"frequency_penalty": 0.5, "logit_bias": {str(self.eos): -99.0}}


@dataclass(frozen=True)
class Case:
    """A few requests, and what an answer to them must be whatever the server is. ask: returns what must be the same of two servers, as
    plain JSON. sharp: whether it runs at every change. demo: whether it needs the demo model: its words, its chat template, or a flag
    of its servers."""

    ask: Callable[[Client], Any]
    sharp: bool = False
    demo: bool = False


CASES: dict[str, Case] = {}


def case(*, sharp: bool = False, demo: bool = False) -> Callable[[Callable], Callable]:
    """A decorator that puts a function among the cases."""

    def put(ask: Callable[[Client], Any]) -> Callable[[Client], Any]:
        CASES[ask.__name__] = Case(ask, sharp, demo)
        return ask

    return put


Ask = tuple[Sequence[int], dict[str, Any]]  # a prompt, and what `Endpoint.generate` takes beside it


class Client(Endpoint):
    """One of the two servers, as a case sees it. adaptive: whether it may want no draft, as on a machine that is too busy to gain by one."""

    def __init__(self, url: str, model: Model, adaptive: bool = False) -> None:
        super().__init__(url)
        self.model, self.adaptive = model, adaptive

    def greedy(self, ids: Sequence[int], **sampling: Any) -> Any:
        """SGLang's answer, or a list of them."""
        return self.generate(ids, **{"temperature": 0, "max_new_tokens": NEW_TOKENS, **sampling})

    def learned(self, ids: Sequence[int], **sampling: Any) -> dict[str, Any]:
        """The answer, once a server that speculates has drafts for it: before, equality would show nothing. One that may want none is
        asked `ASKED` times."""
        answer = self.greedy(ids, **sampling)
        if speculates(answer):

            def accepts() -> bool:
                return self.greedy(ids, **sampling)["meta_info"]["spec_num_correct_drafts"] > 0

            if self.adaptive:
                any(accepts() for _ in range(ASKED))
            else:
                eventually(accepts, "no draft is accepted")
        return answer

    def briefs(self, asks: Mapping[str, Ask], at_once: int = AT_ONCE) -> dict[str, Any]:
        """`brief` of each answer, some at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            answers = pool.map(lambda ask: self.greedy(ask[0], **ask[1]), asks.values())
            return {name: brief(answer) for name, answer in zip(asks, answers, strict=True)}

    def post(self, path: str, body: Any, **settings: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, proxies=PROXIES, timeout=self.timeout, **settings)

    def told(self, path: str, body: Any, **settings: Any) -> Any:
        """The JSON of an answer that is no error."""
        response = self.post(path, body, **settings)
        assert response.ok, f"{path}: {response.status_code} {response.text[:300]}"
        return response.json()

    def events(self, path: str, body: Any) -> list[dict[str, Any]]:
        """What a streamed answer consists of."""
        with self.post(path, body | {"stream": True}, stream=True) as response:
            assert response.ok, f"{path}: {response.status_code} {response.text[:300]}"
            lines = [line[6:] for line in response.iter_lines() if line.startswith(b"data: {")]
        return [json.loads(line) for line in lines]


def speculates(answer: dict[str, Any]) -> bool:
    return "spec_verify_ct" in answer["meta_info"]


def brief(answer: Any) -> Any:
    """What must be the same of two servers, of one answer or of a list. What must fit together in one answer is looked at."""
    if isinstance(answer, list):
        return [brief(one) for one in answer]
    info, tokens = answer["meta_info"], answer["output_ids"]
    assert info["completion_tokens"] == len(tokens)
    logprobs = {name: info[name] for name in info if name.endswith("_logprobs")}
    for name in logprobs:
        assert not name.startswith("output") or len(info[name]) == len(tokens), name
    if speculates(answer):
        check_speculation(info)
    kept = {name: info[name] for name in COMPARED if name in info}
    return {"text": answer["text"], "ids": tokens, **kept, **logprobs}


def check_speculation(info: dict[str, Any]) -> None:
    """What an answer says of its speculation fits its tokens."""
    steps, accepted = info["spec_verify_ct"], info["spec_num_correct_drafts"]
    counts = info["spec_correct_drafts_histogram"]
    assert sum(counts) == steps and sum(i * count for i, count in enumerate(counts)) == accepted
    assert accepted <= info["spec_num_proposed_drafts"] and 0 <= info["spec_accept_rate"] <= 1
    # The prompt brings a token, and it does so again after a retraction.
    assert 1 <= info["completion_tokens"] - accepted - steps <= 1 + info["num_retractions"]
    told = info["specstore"]
    assert 0 <= told["steps"] - steps <= info["num_retractions"]  # whose last step SGLang drops
    assert sum(told["drafted"].values()) == info["spec_num_proposed_drafts"]
    assert sum(told["accepted"].values()) < max(info["completion_tokens"], 1)


def differences(expected: Any, given: Any, where: str = "") -> list[str]:
    """Where two answers differ: in anything, and in floats by more than TOLERANCE."""
    if isinstance(expected, float) and isinstance(given, float):
        same = abs(expected - given) <= TOLERANCE * (1 + abs(expected))
    elif isinstance(expected, dict) and isinstance(given, dict) and expected.keys() == given.keys():
        return [d for key in expected for d in differences(expected[key], given[key], f"{where}/{key}")]
    elif isinstance(expected, list) and isinstance(given, list) and len(expected) == len(given):
        pairs = enumerate(zip(expected, given, strict=True))
        return [d for i, (one, other) in pairs for d in differences(one, other, f"{where}[{i}]")]
    else:
        same = type(expected) is type(given) and expected == given
    return [] if same else [f"{where}: plain {expected!r:.200}, here {given!r:.200}"]
