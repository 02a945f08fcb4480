"""What SGLang's own heads and draft models need of a CPU: one attention backend per forward of the draft.

The draft runs as many forwards as it drafts tokens deep, less one, and SGLang prepares all of them before the first. Draft and
target share the KV slots' numbers: drafted tokens take the slots behind a request's last one, branch after branch. A branch keeps its
slots when SGLang lets it go on from another one's token: its keys are then not its own text's, on a GPU too.
"""

from collections.abc import Callable

import torch

from sglang_patches.cpu import ATTENTION_BACKEND

_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory."


class CpuDraftSteps:
    """The attention of a draft's forwards. attn_backends: of each forward; SGLang reads this name."""

    def __init__(self, model_runner, topk: int, steps: int) -> None:
        from sglang_patches.cpu.attention_backend import CpuTreeAttention

        self.attn_backends = [CpuTreeAttention(model_runner) for _ in range(steps - 1)]
        self._slots = model_runner.req_to_token_pool.req_to_token
        self._branches, self._steps = topk, steps

    def init_forward_metadata(self, forward_batch) -> None:
        """Plans the attention of each forward of the draft.

        forward_batch: its lengths count the cached tokens, its slots are [requests * branches * steps].
        """
        lengths = forward_batch.seq_lens.repeat_interleave(self._branches)
        slots = forward_batch.out_cache_loc.view(-1, self._steps)
        table = self._rows_of_branches(forward_batch.req_pool_indices, lengths, slots)
        for step, attention in enumerate(self.attn_backends):
            attention.plan_decode(table, lengths + step, slots[:, step])

    def _rows_of_branches(
        self, requests: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """A table as of `req_to_token` with a row a branch: the slots of its request's text, and its own behind them."""
        width = int(lengths.max()) + self._steps
        table = self._slots[requests.repeat_interleave(self._branches), :width]
        own = lengths.unsqueeze(1) + torch.arange(self._steps)
        return table.scatter_(1, own, slots.to(table.dtype))


def _serves_draft(factory) -> bool:
    from sglang_patches.host.versions import host

    _, configured = host.attention_backends()
    return (factory.draft_attn_backend or configured) == ATTENTION_BACKEND


def _steps_of_draft(stock: Callable, factory):
    """Replaces DraftBackendFactory.create_decode_backend, which knows SGLang's own backends only."""
    if not _serves_draft(factory) or factory.speculative_num_steps <= 1:
        return stock(factory)
    return CpuDraftSteps(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def _as_the_runner(stock: Callable, factory):
    """Replaces DraftBackendFactory.create_draft_extend_backend: without one, the draft's runner uses its own."""
    return None if _serves_draft(factory) else stock(factory)


HOOKS: dict[str, Callable] = {
    _FACTORY + "create_decode_backend": _steps_of_draft,
    _FACTORY + "create_draft_extend_backend": _as_the_runner,
}
