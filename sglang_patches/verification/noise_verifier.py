"""The sampling scheme that lets drafts foresee sampled tokens: the target draws with noise that it shares with them.

What is emitted is the target's own draw at each node, as with `TargetDraws`, so any draft is verified exactly; and that draw is a
function of the text before it and the request's seed, so the emitted tokens do not depend on what was drafted, or whether.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.utils import is_pin_memory_available

from sglang_patches.host.versions import host
from sglang_patches.verification.filters import keep_filtered
from sglang_patches.verification.shared_noise import NO_NOISE, SEED_BITS, draw
from sglang_patches.verification.target_sampling import Rows, TargetSampler, is_greedy
from sglang_patches.verification.verifier import TargetDraws, from_first_rank

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarMask
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

logger = logging.getLogger(__name__)

# What SGLang takes for the seed of a request without one under --enable-deterministic-inference.
_DETERMINISTIC_SEED = 42
# Values of --sampling-backend that filter in FlashInfer's kernels.
_KERNEL_BACKENDS = ("flashinfer", "intel_xpu")


class SharedNoise(TargetDraws):
    """Draws the token at index i of a sequence (i tokens before it) with the noise of the request's seed at position i.

    Greedy requests take the argmax. SGLang heeds a request's own seed only under --enable-deterministic-inference. There such
    a request keeps plain decoding's own stream, token for token, and one without a seed draws with the noise of SGLang's
    constant, so that its answer can be repeated. In all other cases each request has a random seed, from `source`.
    """

    def __init__(self, sampler: Sampler, source: random.Random | None = None) -> None:
        super().__init__(sampler)
        self._seeds: WeakKeyDictionary[Req, int] = WeakKeyDictionary()
        self._source = source or random.SystemRandom()
        self._deterministic: bool = get_exec().deterministic.enable_deterministic_inference
        self._flashinfer: bool = get_exec().kernel.sampling_backend in _KERNEL_BACKENDS
        own = type(sampler)
        self._shares = (own.forward, own._sample_from_probs) == (Sampler.forward, Sampler._sample_from_probs)
        if not self._shares:
            logger.warning(
                "specstore: %s draws tokens itself: its noise cannot be shared, and few drafts of sampled requests will be right",
                own.__name__,
            )

    def seed_of(self, req: Req) -> int | None:
        """None for greedy requests and those that keep plain decoding's stream. It belongs to the request object: a retracted
        request keeps it, and a later request with the same id has another."""
        if is_greedy(req) or not self._shares:
            return None
        if self._deterministic:
            return _DETERMINISTIC_SEED if req.sampling_params.sampling_seed is None else None
        return self._seeds.setdefault(req, self._source.getrandbits(SEED_BITS))

    def _target(
        self,
        batch: ScheduleBatch,
        logits: torch.Tensor,
        positions: torch.Tensor,
        grammar_mask: GrammarMask | None,
    ) -> TargetSampler:
        seeds = [self.seed_of(req) for req in batch.reqs]
        step = (self._sampler, batch, logits, positions, grammar_mask)
        if all(seed is None for seed in seeds):
            return TargetSampler(*step)
        return _NoiseSampler(seeds, self._flashinfer, *step)


class _NoiseSampler(TargetSampler):
    """Draws with the noise of the requests' seeds, and with SGLang's sampler where a request has none.

    seeds: of the batch's requests, None where SGLang's sampler draws.
    """

    def __init__(self, seeds: Sequence[int | None], flashinfer: bool, *step: Any) -> None:
        super().__init__(*step)
        self._noisy = [seed is not None for seed in seeds]
        self._flashinfer = flashinfer
        device = self._logits.device
        pinned = is_pin_memory_available(device)  # a copy from other memory waits for the forward
        on_host = torch.tensor([NO_NOISE if seed is None else seed for seed in seeds], pin_memory=pinned)
        # Each rank has made its own seeds, and all must draw the same tokens.
        (self._seeds,) = from_first_rank((on_host.to(device, non_blocking=True),))
        self._seeded = not all(
            noisy or is_greedy(req) for noisy, req in zip(self._noisy, self._batch.reqs, strict=True)
        )

    def _sampler_of(self, rows: Rows) -> Sampler:
        """SGLang's sampler with the draw replaced: what comes before it and after it stays as it is."""
        if not any(self._noisy[r] for r in rows.requests):
            return self._sampler
        sampler = copy.copy(self._sampler)
        sampler._sample_from_probs = partial(self._sample_from_probs, rows)
        return sampler

    def _sample_from_probs(
        self,
        rows: Rows,
        probs: torch.Tensor,
        info: SamplingBatchInfo,
        positions: torch.Tensor,
        simple_sampling_case: bool,
    ) -> object:
        """Draws in the place of SGLang's own function.

        positions: of the nodes; the drawn tokens come one behind.
        """
        seeds = self._seeds[rows.index]
        tokens = draw(self._filtered(rows, probs, info), seeds, positions + 1).int()
        if self._seeded:
            own = self._sampler._sample_from_probs(probs, info, positions, simple_sampling_case)
            tokens = torch.where(seeds == NO_NOISE, host.drawn(own), tokens)
        return host.as_draw(tokens)

    def _filtered(self, rows: Rows, probs: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
        """The probabilities after the filters that the requests with noise ask for: no other row's draw needs them."""
        params = [self._batch.reqs[r].sampling_params for r in dict.fromkeys(rows.requests) if self._noisy[r]]
        most = max(p.top_k for p in params)
        return keep_filtered(
            probs,
            info.top_ks if any(p.top_k != TOP_K_ALL for p in params) else None,
            info.top_ps if any(p.top_p != 1.0 for p in params) else None,
            info.min_ps if any(p.min_p > 0 for p in params) else None,
            most=most if most != TOP_K_ALL else None,
            flashinfer=self._flashinfer,
        )
