"""Requests beside others: more than may run, in chunks, aborted, paused, retracted, watched."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from sglang_patches.launch.processes import PROXIES
from tests.conformance.request_cases.asking import Ask, Client, brief, case
from tests.conformance.request_cases.grammars import LONG, OBJECT

# No penalties: stock SGLang samples the first token after a retraction without.
PAUSED = {"max_new_tokens": 160, "ignore_eos": True}
UNENDING = {"temperature": 0, "max_new_tokens": 800, "ignore_eos": True}
# What an answer says that was underway when generation was paused.
SHOWN: dict[str, Callable[[dict[str, Any]], bool]] = {
    "in_place": lambda info: True,
    "retract": lambda info: info["num_retractions"] > 0,
    "abort": lambda info: info["finish_reason"]["type"] == "abort",
}
TRIES = 5  # at what a fast answer may spoil


@case(demo=True)
def more_requests_than_rows(client: Client) -> Any:
    """More requests than may run at once, of all kinds and lengths, each as alone (ArcticInference#145)."""
    first, second, third, fourth, *_ = client.model.texts
    asks: dict[str, Ask] = {
        "plain": (first, {}),
        "stopped": (second, {"stop": ["re", "e "]}),
        "constrained": (third, {"max_new_tokens": LONG, **OBJECT}),
        "short": (fourth, {"max_new_tokens": 3}),
        "penalty": (first, {"frequency_penalty": 0.5}),
        "long prompt": (first * 4, {}),
        "one": (third, {"max_new_tokens": 1}),
    }
    alone = client.briefs(asks, 1)
    many: dict[str, Ask] = {f"{name} {i}": ask for i in range(3) for name, ask in asks.items()}
    for name, answer in client.briefs(many, len(many)).items():
        assert answer == alone[name.rpartition(" ")[0]], name
    return alone


@case()
def long_prompts_in_chunks(client: Client) -> Any:
    """Prompts of several chunks beside running requests, again, and prefixes of each other."""
    first, second, *_ = client.model.texts
    base = first * 3 + second
    asks: dict[str, Ask] = {f"prefix {i}": (base[: len(base) - 31 * i], {}) for i in range(4)}
    asks["running"] = second, {"max_new_tokens": 60, "ignore_eos": True}
    together, again = client.briefs(asks, len(asks)), client.briefs(asks)
    assert together == again
    top = {"return_logprob": True, "logprob_start_len": 10, "top_logprobs_num": 1}
    return [together, client.briefs({"logprobs": (base, {"max_new_tokens": 12, "top": top})})]


def _while_running(client: Client, ids: list[int], rid: str, act: Callable[[], Any]) -> dict[str, Any]:
    """The answer to an unending request after whose first piece `act` is called."""
    body = {"rid": rid, "input_ids": ids, "sampling_params": UNENDING, "stream": True}
    with client.post("/generate", body, stream=True) as response:
        lines = (line for line in response.iter_lines() if line.startswith(b"data: {"))
        first = next(lines)
        act()
        *_, last = first, *lines
    return json.loads(last[6:])


@case(demo=True)
def aborted_requests(client: Client) -> Any:
    """Requests that end in the middle, by name, all together, or since their client has left: the others' answers are whole, a name
    can be used again, and nothing is left behind."""
    first, second, *_ = client.model.texts
    wish = {"max_new_tokens": 120, "ignore_eos": True}
    expected = brief(client.greedy(first, **wish))

    def abort(**what: Any) -> None:
        client.post("/abort_request", what)

    with ThreadPoolExecutor(2) as pool:
        for number in range(3):
            other = pool.submit(client.greedy, first, **wish)
            streamed = f"a stream to be aborted {number}"
            ended = _while_running(client, second, streamed, lambda rid=streamed: abort(rid=rid))
            assert ended["meta_info"]["finish_reason"]["type"] == "abort"
            # Not a stream's name: SGLang aborts whoever has it two seconds after the stream.
            rid = f"to be aborted {number}"
            body = {"rid": rid, "input_ids": second, "sampling_params": UNENDING}
            victim = pool.submit(client.told, "/generate", body)
            while not victim.done():
                abort(rid=rid)
            assert victim.result()["meta_info"]["finish_reason"]["type"] == "abort"
            assert brief(other.result()) == expected
            leaving = client.stream(second, **UNENDING)
            next(leaving)
            leaving.close()
            again = client.told(
                "/generate", {"rid": rid, "input_ids": first, "sampling_params": {"temperature": 0, **wish}}
            )
            assert brief(again) == expected
    _while_running(client, second, "all", lambda: abort(rid="", abort_all=True))
    assert brief(client.greedy(first, **wish)) == expected
    assert requests.post(client.url + "/flush_cache", params={"timeout": 30}, proxies=PROXIES, timeout=60).ok
    return expected


@case(sharp=True)
def paused_and_continued(client: Client) -> Any:
    """Generation stands still, is retracted or is aborted, and goes on: every answer is whole, but those that were aborted (sglang#10071,
    sglang#14180)."""
    texts = client.model.texts[:3]
    expected = client.briefs({str(i): (ids, PAUSED) for i, ids in enumerate(texts)})
    for mode, shown in SHOWN.items():
        for _ in range(TRIES):
            answers = _paused(client, texts, mode)
            for i, answer in enumerate(answers):
                if mode == "abort" and SHOWN["abort"](answer["meta_info"]):
                    assert expected[str(i)]["text"].startswith(answer["text"])
                else:
                    assert brief(answer) == expected[str(i)], mode
            if any(shown(answer["meta_info"]) for answer in answers):
                break
        else:
            raise AssertionError(f"{mode}: every answer was whole before the pause")
    assert brief(client.greedy(texts[0], **PAUSED)) == expected["0"]
    return expected


def _paused(client: Client, texts: list[list[int]], mode: str) -> list[dict[str, Any]]:
    """Answers that are paused when all have begun. One that is aborted before is an error in SGLang 0.5.17."""
    streams = [client.stream(ids, temperature=0, **PAUSED) for ids in texts]
    with ThreadPoolExecutor(len(texts)) as pool:
        begun = list(pool.map(next, streams))
        client.post("/pause_generation", {"mode": mode})
        client.post("/continue_generation", {})
        return list(pool.map(lambda first, rest: [first, *rest][-1], begun, streams))


@case()
def watched_while_busy(client: Client) -> Any:
    """Health, metrics and the server's description are answered while it is busy (sglang#22511, sglang#21413)."""
    done, statuses = threading.Event(), set()

    def watch() -> None:
        while not done.wait(0.1):
            for path in ("health", "server_info", "metrics"):
                statuses.add(requests.get(f"{client.url}/{path}", proxies=PROXIES, timeout=60).status_code)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        texts = client.model.texts
        asks: dict[str, Ask] = {str(i): (texts[i % len(texts)], {"max_new_tokens": 80}) for i in range(12)}
        answers = client.briefs(asks, len(asks))
    finally:
        done.set()
        watcher.join()
    assert statuses == {200}
    return answers
