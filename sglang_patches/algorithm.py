"""Our algorithms as SGLang sees them: one object a method, in the place of a `SpeculativeAlgorithm` member."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_patches.hooks import refuse_if_left_out
from sglang_patches.host_api import drift_message
from sglang_patches.options import load_options
from sglang_patches.workers import endings

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

DEFAULT_MAX_RUNNING_REQUESTS = (
    48  # as SGLang's own n-gram algorithm: KV headroom is reserved per running request
)


class TreeAlgorithm(CustomSpecAlgo):
    """A method that verifies retrieval-drafted trees.

    `is_ngram` is True because SGLang's relay buffers and CUDA-graph capture take their tree shapes from that
    predicate: the trees are irregular and the drafter has neither weights nor KV.
    """

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    # The scheduler calls the next four on every algorithm; the base class lacks them (SGLang 0.5.23).
    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> type | None:
        return None

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: object,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def build_disagg_draft_input(
        self, batch: ScheduleBatch, last_tokens_tensor: torch.Tensor, future_map: FutureMap
    ) -> NgramVerifyInput:
        """On a decode instance. The base class returns None, on which an n-gram algorithm's first step crashes."""
        from sglang_patches.disaggregation.first_step import relay_of_prefilled

        return relay_of_prefilled(
            batch, last_tokens_tensor, get_spec().speculative_num_draft_tokens, future_map
        )

    def handle_server_args(self, server_args: ServerArgs) -> None:
        """Refuses what cannot work, by name, and fills in the speculative fields. Overlap scheduling stays as it is."""
        drift = drift_message()
        if drift is not None:
            raise RuntimeError(drift)
        refuse_unsupported(self.name, server_args)
        cfg = resolving_view(server_args)
        refuse_if_left_out(() if cfg.disaggregation_mode == "prefill" else endings.HOOKS)
        if cfg.speculative_num_draft_tokens is None:
            server_args.speculative_num_draft_tokens = load_options().nodes + 1
        server_args.speculative_num_steps = cfg.speculative_num_draft_tokens - 1
        server_args.speculative_eagle_topk = 1
        server_args.enable_mixed_chunk = False
        if cfg.max_running_requests is None and cfg.disaggregation_mode != "prefill":
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS


def refuse_unsupported(algorithm: str, server_args: ServerArgs) -> None:
    """Raises ValueError naming the first setting that the algorithm cannot work with."""
    cfg = resolving_view(server_args)
    options = load_options()
    options.tls()  # its files too: only a command line has had them read by now
    width = cfg.speculative_num_draft_tokens
    if width is not None and width != options.nodes + 1:
        raise ValueError(
            f"--speculative-num-draft-tokens {width} contradicts --specstore-nodes {options.nodes}: "
            f"the tree's root counts, give {options.nodes + 1} or leave it out"
        )
    if cfg.pp_size > 1:
        raise ValueError(f"{algorithm}: --pp-size {cfg.pp_size} is not supported, only 1")
    if cfg.enable_dp_attention:
        raise ValueError(f"{algorithm}: --enable-dp-attention is not supported")
    if cfg.enable_watermark:
        raise ValueError(f"{algorithm}: --enable-watermark is not supported")
    if cfg.speculative_adaptive:
        raise ValueError(f"{algorithm}: --speculative-adaptive is for EAGLE; see --specstore-length")
    if cfg.enable_pd_role_switch:
        raise ValueError(f"{algorithm}: --enable-pd-role-switch is not supported")
    if cfg.speculative_draft_model_path is not None:
        raise ValueError(f"{algorithm}: --speculative-draft-model-path is not used, leave it out")
