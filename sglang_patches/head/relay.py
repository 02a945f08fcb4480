"""Tokens of the last step that the scheduler has not handed to the requests yet.

Under overlap scheduling a step begins before the last one's results are processed. SGLang relays a head's last token and state from
step to step, not the tokens themselves. Here they are kept on the device by the place of the request in SGLang's pool, and reach the
host as soon as the verification has ended: the head goes on behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch


class TokenRelay:
    """The tokens of each request's last step.

    size: of SGLang's pool of requests. width: most tokens of a step.
    devices: the accelerator's module of torch, None for a CPU.
    """

    def __init__(self, size: int, width: int, device: str, devices: ModuleType | None) -> None:
        self._tokens = torch.zeros((size, width + 1), dtype=torch.int32, device=device)  # and their number
        self._devices = devices
        if devices is not None:
            self._stream, self._kept = devices.Stream(), devices.Event()

    def keep(self, requests: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Keeps a step's tokens, which may still be computed on the current stream.

        requests: int64 [batch], places in the pool.
        tokens: int32 [batch, at most width], each row valid up to its entry of `counts` (int32 [batch]).
        """
        self._tokens[requests, : tokens.shape[1]] = tokens.to(torch.int32)
        self._tokens[requests, -1] = counts.to(torch.int32)
        if self._devices is not None:
            self._kept.record(self._devices.current_stream())

    def last(self, requests: Sequence[int], wanted: Sequence[int]) -> list[list[int]]:
        """The last tokens of each request.

        wanted: number of tokens.
        """
        if not any(wanted):
            return [[] for _ in wanted]
        rows = self._on_host()[list(requests)].tolist()
        return [row[row[-1] - count : row[-1]] for row, count in zip(rows, wanted, strict=True)]

    def _on_host(self) -> torch.Tensor:
        if self._devices is None:
            return self._tokens
        self._stream.wait_event(self._kept)
        with self._devices.stream(self._stream):
            return self._tokens.cpu()
