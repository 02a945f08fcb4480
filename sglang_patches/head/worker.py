"""A decode step of a model with a head of its own, and retrieval beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_patches.head.own import Head
from sglang_patches.head.relay import TokenRelay
from sglang_patches.head.source import BesideHead, HeadWorth
from sglang_patches.ledger.requests import Step
from sglang_patches.metrics import PhaseClock
from sglang_patches.start.tree_attention import BRANCHES, verifies_trees
from sglang_patches.step.assembly import Launch
from sglang_patches.step.base import Callbacks
from sglang_patches.step.decode import DecodeWorker
from sglang_patches.step.widths import Widths, captures_decode_graphs
from sglang_patches.verification.layout import TreeLayout

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.base_spec_worker import EagleDraftWorkerBase


class UnitedTrees(EagleVerifyInput):
    """Trees that are not of the head's shape."""

    @property
    def tree_topk(self) -> int:
        return -1  # any number of children


class HeadWorker(DecodeWorker):
    """The head is one more source of drafts, and it follows what the target accepted."""

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.head = Head(server_args, gpu_id, nccl_port, target_worker, self.max_width)
        self.sources = BesideHead(
            self.head.draft,
            self.sources,
            self.policy.acceptance.estimate,
            self._agreed,
            self.budget,
            HeadWorth() if self.options.length == "adaptive" else None,
        )
        standalone = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm).is_standalone()
        # What the head is given of the target: STANDALONE reads no hidden states.
        self._states = CaptureHiddenMode.NULL if standalone else CaptureHiddenMode.FULL

    def possible_widths(self) -> Widths:
        if captures_decode_graphs(self.device):
            # SGLang captures the graph of the head's extension for one width.
            return Widths((self.max_width,))
        return super().possible_widths()

    def verifies_trees(self) -> bool:
        return verifies_trees(self.model_runner, self.topk)

    def _agreed(self, answer: bool) -> bool:
        return bool(self.broadcast_from_first_rank(np.array([answer]))[0])

    # What the scheduler asks of the worker of a head

    @property
    def draft_worker(self) -> EagleDraftWorkerBase:  # type: ignore[override]
        return self.head.worker.draft_worker

    @property
    def last_shared_read_runner(self) -> ModelRunner:
        return self.head.worker.last_shared_read_runner

    @property
    def spec_v2_attn_backends(self) -> tuple:
        # SGLang brings the lengths to the host if any of these does not say that it can do without them: this worker cannot.
        return (*self.head.worker.spec_v2_attn_backends, self)

    def alloc_memory_pool(self, **pools: object) -> None:
        super().alloc_memory_pool(**pools)
        self.head.worker.alloc_memory_pool(**pools)
        size = self.req_to_token_pool.req_to_token.shape[0]
        devices = None if self.launch_blocks else torch.get_device_module(self.device)
        self.relay = TokenRelay(size, self.max_width, self.device, devices)

    def init_attention_backends(self) -> None:
        if self.budget.children > 1:  # else it verifies chains, as the head alone does
            super().init_attention_backends()
        self.head.worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        self.head.worker.init_cuda_graphs()

    # A step

    def _extend(self, batch: ScheduleBatch, callbacks: Callbacks) -> GenerationBatchResult:
        result = self.head.prefill(batch, callbacks.publish)
        tokens = result.next_token_ids
        self.relay.keep(batch.req_pool_indices, tokens.unsqueeze(1), torch.ones_like(tokens))
        return result

    def _pending(self, batch: ScheduleBatch, lengths: list[int]) -> list[list[int]]:
        missing = [
            length - len(req.origin_input_ids) - len(req.output_ids)
            for req, length in zip(batch.reqs, lengths, strict=True)
        ]
        return self.relay.last(batch.req_pool_indices_cpu.tolist(), missing)

    def _verify_input(self, **trees: Any) -> EagleVerifyInput:
        return UnitedTrees(
            **trees,
            retrieve_cum_len=None,
            spec_steps=trees["draft_token_num"] - 1,
            topk=min(self.budget.children, BRANCHES),
            capture_hidden_mode=self._states,
            seq_lens_sum=None,
            seq_lens_cpu=None,
        )

    def _verify(
        self,
        batch: ScheduleBatch,
        drafted: Launch,
        layout: TreeLayout,
        step: Step,
        clock: PhaseClock,
        callbacks: Callbacks,
    ) -> GenerationBatchResult:
        result = super()._verify(batch, drafted, layout, step, clock, callbacks)
        tokens = result.next_token_ids.view(len(batch.reqs), -1)
        self.relay.keep(batch.req_pool_indices, tokens, result.accept_lens)
        self.head.extend(batch, result)
        batch.forward_mode = ForwardMode.DECODE
        clock.end("extend")
        return result

    def _result(
        self, result, next_token_ids, accept_tokens, accept_lens, new_seq_lens, width
    ) -> GenerationBatchResult:
        last = accept_tokens.gather(1, (accept_lens - 1).long().unsqueeze(1)).squeeze(1)
        return GenerationBatchResult(
            logits_output=result.logits_output,
            next_token_ids=next_token_ids,
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=accept_lens,
            new_seq_lens=new_seq_lens,
            next_draft_input=EagleDraftInput(bonus_tokens=last),
            speculative_num_draft_tokens=width,
        )
