"""What the draft model would go on with, as the target will draw: the same filters, and the same noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_patches.drafting.draft import Candidates
from sglang_patches.drafting.messages import Sampling
from sglang_patches.verification.shared_noise import NO_NOISE, best, filtered_probabilities

COUNT = 32  # of a row


def choose(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[Candidates]:
    """The first choices of each row. logits: [rows, vocabulary]. positions: index in its sequence of the token that is drawn.

    Rows of requests that are drawn without noise take the likeliest tokens.
    """
    device, noisy = logits.device, [sampling.noise is not None for sampling in samplings]
    pairs = list(zip(samplings, noisy, strict=True))
    temperatures = torch.tensor([s.temperature if n else 1.0 for s, n in pairs], device=device)
    top_ks = [s.top_k if n else TOP_K_ALL for s, n in pairs]
    top_ps = [s.top_p if n else 1.0 for s, n in pairs]
    min_ps = [s.min_p if n else 0.0 for s, n in pairs]
    probabilities = filtered_probabilities(
        logits,
        temperatures,
        torch.tensor(top_ks, device=device) if min(top_ks) < TOP_K_ALL else None,
        torch.tensor(top_ps, device=device) if min(top_ps) < 1.0 else None,
        torch.tensor(min_ps, device=device) if max(min_ps) > 0.0 else None,
    )
    seeds = torch.tensor([NO_NOISE if s.noise is None else s.noise for s in samplings], device=device)
    drawn = torch.tensor(positions, device=device)
    tokens, chances = best(probabilities, seeds, drawn, min(COUNT, logits.shape[1]))
    rows = zip(tokens.to(torch.int32).cpu().numpy(), chances.cpu().numpy(), strict=True)
    return [Candidates(*row) for row in rows]
