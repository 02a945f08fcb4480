"""What the draft model would go on with, as the target will draw: the same filters, and the same noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_patches.draft_process.batches import on_device
from sglang_patches.draft_side.draft import Candidates
from sglang_patches.exchange.messages import Sampling
from sglang_patches.verification.shared_noise import NO_NOISE, best, filtered_probabilities

COUNT = 32  # of a row


def choose(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[Candidates]:
    """The first choices of each row. logits: [rows, vocabulary]. positions: index in its sequence of the token that is drawn.

    Rows of requests that are drawn without noise take the likeliest tokens. The host waits for the device once, at the end.
    """
    told = on_device(_wishes(samplings) | {"positions": np.array(positions, np.int64)}, logits.device)
    filters = told.get("top_ks"), told.get("top_ps"), told.get("min_ps")
    probabilities = filtered_probabilities(logits, told["temperatures"], *filters)
    tokens, chances = best(probabilities, told.get("seeds"), told["positions"], min(COUNT, logits.shape[1]))
    found = torch.stack((tokens.to(torch.int32), chances.view(torch.int32))).cpu().numpy()
    return [Candidates(*row) for row in zip(found[0], found[1].view(np.float32), strict=True)]


def _wishes(samplings: Sequence[Sampling]) -> dict[str, np.ndarray]:
    """What the rows ask for, without what none asks for."""
    plain = Sampling(1.0, TOP_K_ALL, 1.0, 0.0, NO_NOISE)
    rows = [plain if sampling.noise is None else sampling for sampling in samplings]
    wishes: dict[str, np.ndarray] = {
        "top_ks": np.array([row.top_k for row in rows], np.int64),
        "top_ps": np.array([row.top_p for row in rows], np.float32),
        "min_ps": np.array([row.min_p for row in rows], np.float32),
        "seeds": np.array([row.noise for row in rows], np.int64),
    }
    nothing = {"top_ks": plain.top_k, "top_ps": plain.top_p, "min_ps": plain.min_p, "seeds": plain.noise}
    asked = {name: of for name, of in wishes.items() if (of != nothing[name]).any()}
    return asked | {"temperatures": np.array([row.temperature for row in rows], np.float32)}
