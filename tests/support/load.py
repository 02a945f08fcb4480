"""Greedy requests without end, each of whose answers must be plain decoding's."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

import numpy as np
import requests

from tests.support.servers.engine import Endpoint
from tests.support.servers.forked import SglangServer, draft_processes
from tests.support.servers.metrics import metric

REQUESTS, STREAMED = 8, 2  # at a time; of these so many are streamed, which shows each step's time
TOKENS = 300
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
SILENCE = 300.0  # without a byte, which comes at the end of what is not streamed: a request hangs


class Load:
    """So many greedy requests at a time until its end, each compared with plain decoding's answer. expected: its answers by their
    prompts. gaps: begin and end, by monotonic, of each time between two pieces of a streamed answer. faults: in words. answers: how many there were."""

    def __init__(self, server: SglangServer, expected: dict[tuple[int, ...], list[int]]) -> None:
        self.gaps: list[tuple[float, float]] = []
        self.faults: list[str] = []
        self.answers = 0
        self._server, self.expected = Endpoint(server.url, SILENCE), expected
        self._prompts = itertools.cycle(expected)
        self._over = threading.Event()
        self._clients = [
            threading.Thread(target=self._ask, args=(at < STREAMED,), daemon=True) for at in range(REQUESTS)
        ]

    def __enter__(self) -> Load:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for client in self._clients:
            client.join(2 * SILENCE)
        assert not any(client.is_alive() for client in self._clients), "a request hangs"

    def seconds(self) -> np.ndarray:
        return np.array([end - begin for begin, end in self.gaps])

    def longest_around(self, moments: Sequence[float]) -> list[float]:
        """Of each moment that falls into gaps the longest of them, in seconds."""
        around = ([end - begin for begin, end in self.gaps if begin <= at <= end] for at in moments)
        return [max(gaps) for gaps in around if gaps]

    def _ask(self, streamed: bool) -> None:
        while not self._over.is_set():
            prompt = next(self._prompts)
            try:
                said = self._stream(prompt) if streamed else self._server.generate(prompt, **GREEDY)
            except requests.RequestException as error:
                self.faults.append(f"request failed: {error}")
                return
            if said["output_ids"] != self.expected[prompt]:
                self.faults.append(f"wrong answer to {prompt}: {said['output_ids']}")
            self.answers += 1

    def _stream(self, prompt: Sequence[int]) -> dict:
        pieces = [(time.monotonic(), piece) for piece in self._server.stream(prompt, **GREEDY)]
        self.gaps += itertools.pairwise(moment for moment, _ in pieces)
        return pieces[-1][1]


def pid_of_draft(server: SglangServer) -> int:
    """0 if there is none."""
    return next((process.pid for process in draft_processes(server)), 0)


def is_up(server: SglangServer) -> bool:
    return metric(server.url, "specstore_draft_up") == 1


def drafts_of(server: SglangServer) -> float:
    """Trees that the draft process has given, in time or waited for."""
    results = ("hit", "waited")
    return sum(metric(server.url, "specstore_speculation_lookups_total", result=of) for of in results)
