"""The first decode step of a request whose prompt another instance has prefilled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from sglang_patches.host.versions import host

if TYPE_CHECKING:
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def relay_of_prefilled(
    batch: ScheduleBatch, last_tokens: torch.Tensor, width: int, future_map: FutureMap
) -> NgramVerifyInput:
    """What the previous step would have left if this instance had prefilled: one accepted token per request.

    last_tokens: int64 [batch], the token that the prefill sampled. width: rows a request may verify."""
    tokens = torch.zeros(len(last_tokens), width, dtype=torch.int32, device=last_tokens.device)
    tokens[:, 0] = last_tokens
    relay = NgramVerifyInput(
        draft_token_num=width,
        new_seq_lens=batch.seq_lens,
        accept_tokens=tokens.flatten(),
        accept_lens=torch.ones(len(last_tokens), dtype=torch.int32, device=last_tokens.device),
    )
    if batch.enable_overlap:
        relay.future_indices = batch.req_pool_indices
        future_map.publish(relay.future_indices, batch.seq_lens)
        host.relay(relay, future_map)
    return relay
