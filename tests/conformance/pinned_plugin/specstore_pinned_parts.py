"""Imported when a worker is made: SGLang's metrics have to be set up before `prometheus_client` is imported."""

from __future__ import annotations

import zlib

import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_patches.step.base import TreeWorker
from sglang_patches.verification.noise_verifier import SharedNoise


class Pinned(SharedNoise):
    """A request's seed follows from its prompt and temperature. So does its first token, which SGLang's sampler draws at prefill, as
    long as requests are prefilled one by one."""

    def __init__(self, sampler) -> None:
        super().__init__(sampler)
        extend = TreeWorker._extend

        def pinned(worker, batch, on_publish):
            torch.manual_seed(_seed(batch.reqs[0]))
            return extend(worker, batch, on_publish)

        TreeWorker._extend = pinned

    def seed_of(self, req: Req) -> int | None:
        return None if super().seed_of(req) is None else _seed(req)


def _seed(req: Req) -> int:
    return zlib.crc32(repr((list(req.origin_input_ids), req.sampling_params.temperature)).encode())
