"""What SGLang's own draft-model methods (STANDALONE) need of the CPU attention: one backend per forward of the draft.

The draft runs as many forwards as a chain has tokens, less one, and SGLang prepares all of them before the first. Draft and
target share the KV slots' numbers: drafted tokens take the slots behind a request's last one.
"""

from collections.abc import Callable

from sglang_patches.cpu import ATTENTION_BACKEND

_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory."


class CpuDraftSteps:
    """The attention of a draft that proposes chains. attn_backends: of each forward; SGLang reads this name."""

    def __init__(self, model_runner, topk: int, steps: int) -> None:
        from sglang_patches.cpu.attention_backend import CpuTreeAttention

        if topk != 1:
            raise NotImplementedError(
                f"specstore: attention backend {ATTENTION_BACKEND} drafts chains: --speculative-eagle-topk 1, not {topk}"
            )
        self.attn_backends = [CpuTreeAttention(model_runner) for _ in range(steps - 1)]
        self._steps = steps

    def init_forward_metadata(self, forward_batch) -> None:
        """Plans the attention of each forward of the draft.

        forward_batch: its lengths count the cached tokens, its slots [requests * steps] are a chain's of each request.
        """
        lengths = forward_batch.seq_lens
        slots = forward_batch.out_cache_loc.view(-1, self._steps)
        for step, attention in enumerate(self.attn_backends):
            attention.plan_decode(forward_batch.req_pool_indices, lengths + step, slots[:, step])


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
