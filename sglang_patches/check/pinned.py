"""Draws with the same noise in every engine of a check, so that sampled answers can be compared.

When serving, each sampled request has a random seed of its own, and plain decoding shares no noise with anybody. Here all requests have
one seed, and SGLang's sampler draws with its noise too: in plain decoding, in the prefill, and for methods that match drafts against
SGLang's own draws. All else is what serves: a method's sampled answer is then plain decoding's, whatever it drafts.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from sglang_patches.verification.noise_verifier import SharedNoise

SEED = 7


def run_scheduler(*arguments: object, **named: object) -> None:
    """SGLang's scheduler process with pinned noise."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins import load_plugins

    load_plugins()
    pin_noise()
    run_scheduler_process(*arguments, **named)


def pin_noise() -> None:
    """Pins the noise of this process, for good."""
    from sglang.srt.layers.sampler import Sampler

    from sglang_patches.verification.noise_verifier import SharedNoise

    # With SGLang's own signature, which every worker compares with the table of symbols.
    pinned = functools.wraps(Sampler._sample_from_probs)(_sample_from_probs)
    setattr(Sampler, "_sample_from_probs", pinned)  # noqa: B010 - a method is no variable
    setattr(SharedNoise, "seed_of", _seed_of)  # noqa: B010 - as above


def _seed_of(verifier: SharedNoise, req: Req) -> int | None:
    from sglang_patches.verification.target_sampling import is_greedy

    return None if is_greedy(req) else SEED


def _sample_from_probs(
    sampler: Sampler,
    probs: torch.Tensor,
    info: SamplingBatchInfo,
    positions: torch.Tensor,
    simple_sampling_case: bool,
) -> object:
    """Draws in the place of SGLang's own function.

    positions: of the tokens that the draws follow.
    """
    import torch

    from sglang_patches.host.versions import host
    from sglang_patches.verification.filters import keep_filtered
    from sglang_patches.verification.shared_noise import draw

    if not simple_sampling_case:
        probs = keep_filtered(probs, info.top_ks, info.top_ps, info.min_ps)
    seeds = torch.full((len(probs),), SEED, dtype=torch.int64, device=probs.device)
    return host.as_draw(draw(probs, seeds, positions + 1).int())
