"""Exact verification of draft trees.

Lossless by construction: at every node the target's own token is drawn as plain decoding would draw it in that state,
and the walk goes on only if a child carries that very token. Whatever was drafted, the emitted tokens are successive
draws from plain decoding's conditional distributions, so greedy output is identical and sampled output has plain
decoding's distribution. For a drafted (not sampled) tree this accepts exactly as often as speculative sampling: the
probability to go on from a node is the target's mass on its children.

SGLang's ``eagle_sample`` is not used, because it differs from plain decoding: on a CPU it takes the argmax whatever
the temperature, everywhere it repeats the step's first penalties at all nodes and counts only a step's last token
towards them, and it ignores min-p and custom logit processors and applies top-p after renormalising top-k.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.runtime_context import get_parallel

from sglang_patches.host.versions import host
from sglang_patches.verification.layout import TreeLayout
from sglang_patches.verification.penalties import penalise
from sglang_patches.verification.target_sampling import Node, TargetSampler, needs_plain_step

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarMask
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

NO_NODE = -1
verify_tree_greedy_func = host.tree_walk()

Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Tensors = TypeVar("Tensors", bound=tuple[torch.Tensor, ...])


class Verifier(ABC):
    """A sampling scheme: how the target's own tokens are drawn at the nodes of a tree, and which path they follow."""

    @abstractmethod
    def verify(
        self,
        verify_input: NgramVerifyInput,
        layout: TreeLayout,
        batch: ScheduleBatch,
        logits_output: LogitsProcessorOutput,
        grammar_mask: GrammarMask | None = None,
        pending: Sequence[Sequence[int]] | None = None,
    ) -> Result:
        """Accept the longest drafted path the target itself would have produced, plus one token of its own.

        When the batch asks for log-probabilities, ``logits_output``'s fields are filled with what plain decoding reports;
        the caller must not call ``compute_spec_logprobs``, which would recompute them from logits without penalties.

        Args:
            verify_input: the trees, ``draft_token_num`` nodes a request, node 0 being the last emitted token.
                Nodes not linked from the root are padding and never accepted.
            layout: the same trees on the host.
            batch: the verified batch (``forward_mode`` target-verify or idle).
            logits_output: the verify forward's output, logits ``[rows, vocab]``, which may be overwritten.
            grammar_mask: from ``build_grammar_vocab_mask`` for each row of the forward, or None.
            pending: per request, accepted tokens not yet in ``req.output_ids`` (needed with overlap scheduling, where
                the last step's result is processed late; None otherwise). Read only for requests with penalties.

        Returns:
            ``predict`` int32 ``[requests * nodes]``: the target's token at each accepted node, 0 elsewhere;
            ``accept_lens`` int32 ``[requests]``: emitted tokens including the target's own;
            ``accept_index`` int32 ``[requests, nodes]``: flat indices of the accepted nodes, root first, then -1.

        Raises:
            ValueError: the batch carries watermarks, whose state this does not advance.
        """

    def seed_of(self, req: Req) -> int | None:
        """Seed of the noise that the request's tokens are drawn with (`shared_noise`), the same as long as the request lives; None
        where they are drawn without. The first caller settles it."""
        return None


class TargetDraws(Verifier):
    """Draws every token as plain decoding would draw it.

    On a CPU nodes are sampled as the walk reaches them, one call a depth for the whole batch: accepted tokens + 1
    rows a request instead of the whole tree. Elsewhere all nodes are sampled in one call and SGLang's tree kernel
    walks them, without a host synchronisation unless a request asks for log-probabilities.

    sampler: ``model_runner.sampler``.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def verify(
        self,
        verify_input: NgramVerifyInput,
        layout: TreeLayout,
        batch: ScheduleBatch,
        logits_output: LogitsProcessorOutput,
        grammar_mask: GrammarMask | None = None,
        pending: Sequence[Sequence[int]] | None = None,
    ) -> Result:
        if batch.forward_mode.is_idle():
            empty = torch.empty(0, dtype=torch.int32, device=batch.device)
            return empty, empty.clone(), empty.clone()
        if host.watermarked(batch.sampling_info):
            raise ValueError("watermark: not supported by specstore's speculative algorithms")
        logits = logits_output.next_token_logits
        penalise(logits, batch.reqs, pending, layout)
        target = self._target(batch, logits, verify_input.positions, grammar_mask)
        walk = _verify_walking if logits.device.type == "cpu" else _verify_all_nodes
        result = from_first_rank(walk(verify_input, layout, batch, target))
        if target.logprobs is not None:
            target.logprobs.write_to(logits_output, width=verify_input.draft_token_num)
        return result

    def _target(
        self,
        batch: ScheduleBatch,
        logits: torch.Tensor,
        positions: torch.Tensor,
        grammar_mask: GrammarMask | None,
    ) -> TargetSampler:
        return TargetSampler(self._sampler, batch, logits, positions, grammar_mask)


@dataclass(frozen=True)
class HostTrees:
    """The batch's draft trees on the host; all lists are ``[requests][nodes]``. rows: of logits."""

    rows: list[list[int]]
    tokens: list[list[int]]
    first_child: list[list[int]]
    next_sibling: list[list[int]]

    @classmethod
    def of(cls, layout: TreeLayout) -> HostTrees:
        return cls(
            rows=layout.rows_of_nodes.tolist(),
            tokens=layout.tokens.reshape(layout.next_token.shape).tolist(),
            first_child=layout.next_token.tolist(),
            next_sibling=layout.next_sibling.tolist(),
        )

    def children(self, request: int, node: int):
        child = self.first_child[request][node]
        while child != NO_NODE:
            yield child
            child = self.next_sibling[request][child]

    def child_with_token(self, request: int, node: int, token: int) -> int:
        tokens = self.tokens[request]
        return next((c for c in self.children(request, node) if tokens[c] == token), NO_NODE)


def _verify_walking(
    verify_input: NgramVerifyInput, layout: TreeLayout, batch: ScheduleBatch, target: TargetSampler
) -> Result:
    trees = HostTrees.of(layout)
    accepted: list[list[int]] = [[0] for _ in batch.reqs]
    emitted: list[list[int]] = [[] for _ in batch.reqs]
    plain_only = {i for i, req in enumerate(batch.reqs) if needs_plain_step(req)}
    frontier = list(range(len(batch.reqs)))
    while frontier:
        nodes = [Node(r, trees.rows[r][accepted[r][-1]], list(emitted[r])) for r in frontier]
        going_on = []
        for r, token in zip(frontier, target.sample(nodes), strict=True):
            emitted[r].append(token)
            child = NO_NODE if r in plain_only else trees.child_with_token(r, accepted[r][-1], token)
            if child != NO_NODE:
                accepted[r].append(child)
                going_on.append(r)
        frontier = going_on
    return _pack(trees, accepted, emitted, batch.device)


def _pack(trees: HostTrees, accepted: list[list[int]], emitted: list[list[int]], device) -> Result:
    num_nodes = len(trees.rows[0])
    predict = np.zeros(len(accepted) * num_nodes, np.int32)
    accept_index = np.full((len(accepted), num_nodes), -1, np.int32)
    for r, (nodes, tokens) in enumerate(zip(accepted, emitted, strict=True)):
        numbers = [r * num_nodes + node for node in nodes]
        predict[numbers] = tokens
        accept_index[r, : len(nodes)] = numbers
    accept_lens = np.array([len(tokens) for tokens in emitted], np.int32)
    return tuple(torch.from_numpy(array).to(device) for array in (predict, accept_lens, accept_index))


def _verify_all_nodes(
    verify_input: NgramVerifyInput, layout: TreeLayout, batch: ScheduleBatch, target: TargetSampler
) -> Result:
    num_requests, num_nodes = verify_input.retrieve_index.shape
    output, tokens = target.sample_all(num_nodes)
    predict, accept_index, num_drafts = verify_tree_greedy_func(
        predicts=torch.zeros(num_requests * num_nodes, dtype=torch.int32, device=batch.device),
        accept_index=torch.full((num_requests, num_nodes), -1, dtype=torch.int32, device=batch.device),
        accept_token_num=torch.empty(num_requests, dtype=torch.int32, device=batch.device),
        candidates=verify_input.draft_token.view(num_requests, num_nodes),
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=_unlink_plain_steps(verify_input.retrieve_next_token, layout, batch),
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=tokens.long().view(num_requests, num_nodes),
        topk=verify_input.tree_topk,
    )
    if target.logprobs is not None:
        target.logprobs.add(output, _accepted_rows(accept_index))
    return predict, num_drafts + 1, accept_index


def _unlink_plain_steps(first_child: torch.Tensor, layout: TreeLayout, batch: ScheduleBatch) -> torch.Tensor:
    drafted = layout.next_token[:, 0] != NO_NODE  # a copy to the device waits, so only where there is a draft
    plain_only = [i for i, req in enumerate(batch.reqs) if drafted[i] and needs_plain_step(req)]
    if plain_only:
        first_child = first_child.clone()
        first_child[plain_only, 0] = NO_NODE
    return first_child


def _accepted_rows(accept_index: torch.Tensor) -> list[tuple[int, int, int]]:
    """(request, index among its accepted tokens, row of logits) of every accepted node."""
    return [
        (r, s, row) for r, rows in enumerate(accept_index.tolist()) for s, row in enumerate(rows) if row >= 0
    ]


def from_first_rank(tensors: Tensors) -> Tensors:
    """Tensor-parallel ranks must commit the same tokens even where their floating point differs: rank 0's. Overwrites the others'."""
    parallel = get_parallel()
    group = parallel.attn_tp_group if is_dp_attention_enabled() else parallel.tp_group
    if group.world_size > 1:
        for tensor in tensors:
            group.broadcast(tensor, src=0)
    return tensors
