"""Tree -> verify -> commit: a decode step as SGLang sees it.

It runs on SGLang's V2 schema, with and without overlap scheduling. A subclass supplies the trees.
"""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.observability.req_time_stats import set_time_batch
from sglang.srt.runtime_context import get_device, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    commit_mamba_states_after_verify,
    move_accept_tokens_to_target_kvcache,
    prepare_mamba_track_for_verify,
    record_stream_for_v2_verify,
)

from sglang_patches.cpu import ROWS_BY_REQUEST
from sglang_patches.host.symbols import drift_message
from sglang_patches.ledger.requests import Step
from sglang_patches.metrics import PhaseClock
from sglang_patches.start.attention_probe import check_tree_attention
from sglang_patches.start.room import check_room, check_verification_memory
from sglang_patches.start.tree_attention import refuse_unfit
from sglang_patches.step.widths import WidthGraphs
from sglang_patches.verification.layout import TreeLayout, attention_mask, lay_out
from sglang_patches.verification.verifier import TargetDraws, Verifier

if TYPE_CHECKING:
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpecInput


class Callbacks(NamedTuple):
    """What the scheduler asks to be called in a step.

    publish: takes the requests' new lengths, as soon as the device will have them.
    grammar_barrier: brings the grammars' states up to date, before they are read; None where they are.
    """

    publish: Callable[[torch.Tensor], None] | None = None
    grammar_barrier: Callable[[], None] | None = None


@dataclass(slots=True)
class Drafted:
    """A step's trees.

    packed: int32 [batch, 2, width - 1] as from `layout.pack`, the same on every tensor-parallel rank.
    widths: int64 [batch], rows of each request, as `lay_out` takes them.
    """

    packed: np.ndarray
    widths: np.ndarray


OfStep = TypeVar("OfStep", bound=Drafted)


class TreeWorker(BaseSpecWorker, Generic[OfStep]):
    """A speculative worker of SGLang that verifies draft trees. A subclass supplies the trees.

    max_width: most rows of a request in one step, root included.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        gpu_id: int,
        nccl_port: int,
        target_worker: TpModelWorker,
        verifier: Callable[[Sampler], Verifier] | None = None,
    ) -> None:
        super().__init__()
        drift = drift_message()
        if drift is not None:
            raise RuntimeError(drift)
        self.server_args = server_args
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        self.verifier = (verifier or TargetDraws)(self.model_runner.sampler)
        self.device = get_device().device
        self.page_size = get_schedule().page_size
        self.max_width: int = get_spec().speculative_num_draft_tokens
        # The scheduler reads these on every speculative worker.
        self.speculative_num_draft_tokens = self.max_width
        self.speculative_num_steps = get_spec().speculative_num_steps
        self.topk = get_spec().speculative_eagle_topk
        self.last_position: int = self.model_runner.model_config.context_len - 1
        self.width_graphs: WidthGraphs | None = None
        # Of the tensor-parallel ranks. It drafts, and counts for all: the metrics of a server's processes are added up.
        self.first_rank: bool = get_parallel().tp_rank == 0

    @property
    def draft_worker(self) -> None:
        return None

    def alloc_memory_pool(self, **kwargs: object) -> None:
        self.req_to_token_pool, self.token_to_kv_pool_allocator = self._target_worker.get_memory_pool()
        check_room(self.req_to_token_pool.req_to_token.shape[1], self.last_position + 1)
        self.check_memory()

    def check_memory(self) -> None:
        """Raises RuntimeError if the widest step does not fit beside the KV cache."""
        check_verification_memory(
            self.most_rows(self.req_to_token_pool.size),
            self.model_runner.model_config.vocab_size,
            self.model_runner.dtype,
            self.device,
            self.model_runner.gpu_id,
        )

    def most_rows(self, batch: int) -> int:
        """The most rows that a decode step of at most `batch` requests has."""
        return batch * self.max_width

    def init_attention_backends(self) -> None:
        refuse_unfit(self.model_runner)
        check_tree_attention(self.model_runner, self.max_width)

    def init_cuda_graphs(self) -> None:
        if self.width_graphs is not None:
            self.width_graphs.capture()

    @functools.cached_property
    def launch_blocks(self) -> bool:
        """Whether a forward has ended when its launch returns."""
        return torch.device(self.device).type == "cpu"

    def deepest_node(self, length: int) -> int:
        """Depth of the deepest node that a request of `length` tokens may have. The root has depth 0. The root of the next step must
        lie within the context, and overlap scheduling runs one step more than a request needs. A root beyond the context would
        have no position in a learned embedding, and an attention backend's table would run into the next request's. No emitted
        token is lost: SGLang ends a request before it gets there."""
        return max(0, self.last_position - length)

    @abstractmethod
    def draft_batch(self, batch: ScheduleBatch, step: Step) -> OfStep:
        """Trees for a decode step below its roots. No node lies deeper than `deepest_node`."""

    def verification_begins(self, drafted: OfStep, layout: TreeLayout) -> None:  # noqa: B027 - nothing, unless a method looks into the forward
        """Called in a decode step before the target's forward is launched."""

    def verification_launched(self, batch: ScheduleBatch, drafted: OfStep) -> None:  # noqa: B027 - nothing, unless a method learns
        """Called in a decode step after the target's forward was launched. Work that no launch waits for belongs here: on an
        accelerator it runs beside the forward. On a CPU it is called right before the forward, which has ended when its launch
        returns: what the draft side is told here must reach it before."""

    def tokens_underway(  # noqa: B027 - as above
        self, drafted: OfStep, accept_tokens: torch.Tensor, accept_lens: torch.Tensor
    ) -> None:
        """Called in a decode step if the host does not have its tokens yet. accept_tokens: int32 [batch, width], each row valid up to
        its entry of accept_lens (int32 [batch]). The work that makes them is on the current stream."""

    def tokens_known(self, step: Step) -> None:  # noqa: B027 - nothing, unless a method learns
        """Called at the end of a decode step if the host has its tokens already, as on a CPU. step: the beginning of the next
        step, if no request joins or leaves."""

    @abstractmethod
    def observe_prefill(self, batch: ScheduleBatch) -> None:
        """Called before the target's forward of an extend batch; must not block."""

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        pp_proxy_tensors: object = None,
        grammar_barrier: Callable[[], None] | None = None,
    ) -> GenerationBatchResult:
        stream = torch.get_device_module(self.device).current_stream()
        record_stream_for_v2_verify(batch, None, stream)
        callbacks = Callbacks(on_publish, grammar_barrier)
        if batch.forward_mode.is_decode():
            return self._decode(batch, callbacks)
        if batch.forward_mode.is_extend():
            self.observe_prefill(batch)
        return self._extend(batch, callbacks)

    def _extend(self, batch: ScheduleBatch, callbacks: Callbacks) -> GenerationBatchResult:
        result = self.target_worker.forward_batch_generation(batch)
        new_seq_lens = batch.seq_lens.clone()
        if callbacks.publish is not None:
            callbacks.publish(new_seq_lens)
        lens = torch.ones(len(batch.reqs), dtype=torch.int32, device=self.device)
        tokens = result.next_token_ids
        return self._result(result, tokens, tokens.unsqueeze(1), lens, new_seq_lens, self.max_width)

    def _decode(self, batch: ScheduleBatch, callbacks: Callbacks) -> GenerationBatchResult:
        set_time_batch(batch.reqs, "set_spec_draft_start_time", trace_only=True)
        clock = PhaseClock(counted=self.first_rank)
        lengths = (batch.seq_lens_cpu + 1).tolist()
        pending = self._pending(batch, lengths)
        step = Step(batch.reqs, lengths, pending)
        drafted = self.draft_batch(batch, step)
        clock.end("draft")
        roots = np.array(step.roots, np.int64)
        layout = lay_out(drafted.packed, roots, batch.seq_lens_cpu.numpy(), drafted.widths)
        with self._verifying(layout.mask.shape[1]):
            return self._verify(batch, drafted, layout, step, clock, callbacks)

    def _verifying(self, width: int) -> contextlib.AbstractContextManager[None]:
        """The target verifies steps of this width inside the block."""
        return self.width_graphs.of_width(width) if self.width_graphs else contextlib.nullcontext()

    def _verify(
        self,
        batch: ScheduleBatch,
        drafted: OfStep,
        layout: TreeLayout,
        step: Step,
        clock: PhaseClock,
        callbacks: Callbacks,
    ) -> GenerationBatchResult:
        slots = self._prepare_verify(batch, layout)
        set_time_batch(batch.reqs, "set_spec_draft_end_time", trace_only=True)
        clock.end("prepare")
        if self.launch_blocks:
            self.verification_launched(batch, drafted)
            clock.end("learn")
        self.verification_begins(drafted, layout)
        result = self.target_worker.forward_batch_generation(batch, is_verify=True)
        clock.end("forward")
        if not self.launch_blocks:
            self.verification_launched(batch, drafted)
            clock.end("learn")
        grammar_mask = None
        if batch.has_grammar:
            grammar_mask = self._grammar_mask(batch, layout, callbacks.grammar_barrier)
        predict, accept_lens, accept_index = self.verifier.verify(
            batch.spec_info, layout, batch, result.logits_output, grammar_mask, step.pending
        )
        clock.end("verify")
        accept_tokens = predict[accept_index.long()]
        on_host = accept_tokens.device.type == "cpu"
        if not on_host:
            self.tokens_underway(drafted, accept_tokens, accept_lens)
        batch.out_cache_loc = slots
        self._commit(batch, result, layout, accept_lens, accept_index)
        new_seq_lens = batch.seq_lens + accept_lens
        if callbacks.publish is not None:
            callbacks.publish(new_seq_lens)
        batch.forward_mode = ForwardMode.DECODE
        width = layout.mask.shape[1]
        generated = self._result(
            result, accept_tokens.flatten(), accept_tokens, accept_lens, new_seq_lens, width
        )
        clock.end("commit")
        if on_host:
            self.tokens_known(_following(step, accept_tokens, accept_lens))
        return generated

    def _pending(self, batch: ScheduleBatch, lengths: list[int]) -> list[list[int]]:
        """Under overlap scheduling a request lacks the tokens of the last step. The batch's relay has them."""
        tokens = batch.spec_info.accept_tokens.cpu().view(-1, self.max_width).tolist()
        counts = batch.spec_info.accept_lens.tolist()
        missing = [
            length - len(req.origin_input_ids) - len(req.output_ids)
            for req, length in zip(batch.reqs, lengths, strict=True)
        ]
        return [
            row[count - lag : count] if lag > 0 else []
            for row, count, lag in zip(tokens, counts, missing, strict=True)
        ]

    def _prepare_verify(self, batch: ScheduleBatch, layout: TreeLayout) -> torch.Tensor:
        """Returns the KV slots of the nodes, int64 [batch * width]; the batch has those of the forward's rows."""
        size, width, _ = layout.mask.shape
        rows = slice(None) if layout.uniform else layout.rows
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = self._to_device(layout.tokens[rows])
        slots = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=batch.req_to_token_pool.req_to_token,
            start_offset=batch.seq_lens,
            end_offset=batch.seq_lens + width,
            batch_size=size,
            draft_token_num=width,
            device=self.device,
        )
        batch.out_cache_loc = slots[rows]
        prepare_mamba_track_for_verify(batch)
        batch.spec_info = self._verify_input(
            draft_token=batch.input_ids,
            custom_mask=attention_mask(layout.mask, batch.seq_lens_cpu.numpy(), self.device),
            positions=self._to_device(layout.positions[rows]),
            retrieve_index=self._to_device(layout.retrieve_index),
            retrieve_next_token=self._to_device(layout.next_token),
            retrieve_next_sibling=self._to_device(layout.next_sibling),
            draft_token_num=width,
        )
        if not layout.uniform:
            setattr(batch.spec_info, ROWS_BY_REQUEST, layout.widths.tolist())
        return slots

    def _verify_input(self, **trees: Any) -> SpecInput:
        """The trees as SGLang's algorithm verifies them."""
        return NgramVerifyInput(**trees)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _grammar_mask(self, batch: ScheduleBatch, layout: TreeLayout, barrier: Callable[[], None] | None):
        size, width, _ = layout.mask.shape
        tree = GrammarTree.from_host(
            torch.from_numpy(layout.next_token),
            torch.from_numpy(layout.next_sibling),
            torch.from_numpy(layout.tokens).view(size, width),
        )
        mask = build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=tree,
            sampling_info=batch.sampling_info,
            device=self.device,
            barrier=barrier,
        )
        if mask is None or layout.uniform:
            return mask
        return mask._replace(vocab_mask=mask.vocab_mask[layout.rows])

    def _commit(self, batch: ScheduleBatch, result, layout: TreeLayout, accept_lens, accept_index) -> None:
        """Keeps the accepted path's KV."""
        width = batch.spec_info.draft_token_num
        commit_mamba_states_after_verify(self.target_worker, batch, accept_lens, accept_index, width)
        if width > 1:  # a root alone lies where it belongs
            move_accept_tokens_to_target_kvcache(
                batch, accept_index, accept_lens - 1, self.token_to_kv_pool_allocator
            )
        if result.logits_output.hidden_states is not None:
            # One row per emitted token: the scheduler expects rows of the accepted path, not of the tree.
            accepted = accept_index.flatten().long()
            if not layout.uniform:
                accepted = torch.from_numpy(layout.rows_of_nodes.flatten())[accepted]
            result.logits_output.hidden_states = result.logits_output.hidden_states[accepted]

    def _result(
        self, result, next_token_ids, accept_tokens, accept_lens, new_seq_lens, width
    ) -> GenerationBatchResult:
        relay = torch.zeros(len(accept_lens), self.max_width, dtype=torch.int32, device=self.device)
        relay[:, : accept_tokens.shape[1]] = accept_tokens
        return GenerationBatchResult(
            logits_output=result.logits_output,
            next_token_ids=next_token_ids,
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=accept_lens,
            new_seq_lens=new_seq_lens,
            next_draft_input=NgramVerifyInput(
                draft_token_num=self.max_width,
                new_seq_lens=new_seq_lens,
                accept_tokens=relay.flatten(),
                accept_lens=accept_lens,
            ),
            speculative_num_draft_tokens=width,
        )

    def broadcast_from_first_rank(self, array: np.ndarray) -> np.ndarray:
        """Rank 0's array on every tensor-parallel rank, so that all verify the same tree. Shape and dtype are the same on all."""
        group = get_parallel().tp_group
        if group.world_size == 1:
            return array
        tensor = torch.from_numpy(array)
        torch.distributed.broadcast(tensor, src=group.ranks[0], group=group.cpu_group)
        return tensor.numpy()


def _following(step: Step, accept_tokens: torch.Tensor, accept_lens: torch.Tensor) -> Step:
    """The step after this one, of the same requests. accept_tokens: [batch, width], valid up to accept_lens; on the host."""
    counts = accept_lens.tolist()
    emitted = [row[:count] for row, count in zip(accept_tokens.tolist(), counts, strict=True)]
    return Step(
        step.reqs,
        [length + count for length, count in zip(step.lengths, counts, strict=True)],
        [[*tail, *tokens] for tail, tokens in zip(step.pending, emitted, strict=True)],
    )
