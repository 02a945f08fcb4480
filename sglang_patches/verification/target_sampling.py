"""The target's next token at a node of a draft tree, chosen exactly as plain decoding chooses it.

Plain decoding is ``ModelRunner.sample``: penalties, grammar mask, logit bias, custom logit processors, then
temperature, softmax, top-k, top-p, min-p and the draw. Here the same SGLang objects run in the same order on the rows
of the verified nodes, except for the penalties, which SGLang accumulates once per step and only for the last token
of a step. They have been applied before, from every token that precedes a node (:mod:`sglang_patches.verification.penalties`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.constrained.base_grammar_backend import GrammarMask
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

from sglang_patches.host.versions import host

if TYPE_CHECKING:
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


def needs_plain_step(req: Req) -> str | None:
    """Why this request must get an empty tree (draft budget 0), or None when every drafted node is verified exactly.

    A custom logit processor may read ``req.output_ids`` or count its calls, so it can only be asked about the
    request's present state: the root. `TargetDraws` enforces the same rule whatever tree it is given.
    """
    return "custom_logit_processor" if req.custom_logit_processor else None


def is_greedy(req: Req) -> bool:
    """Temperature 0 arrives here as top_k 1 (`SamplingParams.__post_init__`)."""
    return req.sampling_params.top_k <= 1


class Node(NamedTuple):
    """One node of the batch's draft trees."""

    request: int  # row in the batch
    row: int  # row in next_token_logits and positions
    path: Sequence[int]  # drafted tokens from below the root down to this node


class TargetSampler:
    """Samples the target's token at nodes of one verification step.

    Args:
        sampler: the model runner's sampler, so a registered custom backend is honoured.
        batch: the verified batch; ``sampling_info`` is read, never changed.
        logits: ``[requests * nodes, vocab]``, one row a node, penalised already; overwritten.
        positions: ``[requests * nodes]``, the sequence position of each node's token. With ``sampling_seed`` they
            choose the noise, so a seeded request draws the token plain decoding draws.
        grammar_mask: ``build_grammar_vocab_mask``'s result, one row a node, or None.
    """

    def __init__(
        self,
        sampler: Sampler,
        batch: ScheduleBatch,
        logits: torch.Tensor,
        positions: torch.Tensor,
        grammar_mask: GrammarMask | None = None,
    ):
        self._sampler = sampler
        self._batch = batch
        self._logits = logits
        self._positions = positions
        self._grammar_mask = grammar_mask
        self.logprobs = LogprobRecord(batch) if batch.return_logprob else None

    def sample(self, nodes: Sequence[Node]) -> list[int]:
        """The target's token at each node. Greedy nodes take the argmax whoever shares their batch."""
        tokens = [0] * len(nodes)
        for greedy in (True, False):
            group = [i for i, node in enumerate(nodes) if is_greedy(self._batch.reqs[node.request]) is greedy]
            if group:
                for i, token in zip(group, self._sample_group([nodes[i] for i in group]), strict=True):
                    tokens[i] = token
        return tokens

    def sample_all(self, nodes_per_request: int) -> tuple[LogitsProcessorOutput, torch.Tensor]:
        """The target's token at every node in one call, without a host synchronisation. Overwrites the logits.

        Args:
            nodes_per_request: rows of logits a request has; row ``r * nodes_per_request`` is its root.

        Returns:
            The sampler's output and the tokens, ``[requests * nodes]``.
        """
        requests = range(len(self._batch.reqs))
        index = torch.arange(len(requests), device=self._logits.device)
        rows = Rows(
            requests=[r for r in requests for _ in range(nodes_per_request)],
            index=index.repeat_interleave(nodes_per_request),
            positions=self._positions,
            roots={r: r * nodes_per_request for r in requests},
            grammar_mask=self._grammar_mask,
        )
        return self._draw(self._logits, rows)

    def _sample_group(self, nodes: Sequence[Node]) -> list[int]:
        rows = self._rows_of(nodes)
        logits = self._logits_of([node.row for node in nodes])
        output, tokens = self._draw(logits, rows)
        if self.logprobs is not None:
            self.logprobs.add(output, [(node.request, len(node.path), i) for i, node in enumerate(nodes)])
        return tokens.tolist()

    def _logits_of(self, rows: list[int]) -> torch.Tensor:
        """A copy, as sampling changes logits in place; but where every row is sampled now, none is read again."""
        if rows == list(range(len(self._logits))):
            return self._logits
        return self._logits[rows]

    def _rows_of(self, nodes: Sequence[Node]) -> Rows:
        requests, selected = [node.request for node in nodes], [node.row for node in nodes]
        mask = self._grammar_mask
        return Rows(
            requests=requests,
            index=torch.tensor(requests, device=self._logits.device),
            positions=self._positions[selected],
            roots={node.request: i for i, node in enumerate(nodes) if not node.path},
            grammar_mask=None if mask is None else mask._replace(vocab_mask=mask.vocab_mask[selected]),
        )

    def _draw(self, logits: torch.Tensor, rows: Rows) -> tuple[LogitsProcessorOutput, torch.Tensor]:
        batch = self._batch
        info = select_sampling_info(batch, rows)
        info.apply_logits_bias(logits)
        top = batch.top_logprobs_nums or [0] * len(batch.reqs)
        ids = batch.token_ids_logprobs or [None] * len(batch.reqs)
        output = LogitsProcessorOutput(next_token_logits=logits)
        tokens = self._sampler_of(rows)(
            output,
            info,
            batch.return_logprob,
            [top[r] for r in rows.requests],
            [ids[r] for r in rows.requests],
            rows.positions,
        )
        return output, tokens

    def _sampler_of(self, rows: Rows) -> Sampler:
        """What draws the tokens of these rows."""
        return self._sampler


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of logits to sample: row i belongs to request ``requests[i]``, which is also ``index[i]`` on the device."""

    requests: Sequence[int]
    index: torch.Tensor
    positions: torch.Tensor
    roots: Mapping[int, int]  # request -> its root's row, the only one its custom logit processor sees
    grammar_mask: GrammarMask | None


def select_sampling_info(batch: ScheduleBatch, rows: Rows) -> SamplingBatchInfo:
    """The batch's sampling parameters, one entry a row.

    Penalties are left out (the logits have them), and so is the token synchronisation between tensor-parallel ranks
    that SGLang ties to grammars: the caller broadcasts the verified result instead.
    """
    info = batch.sampling_info
    processors = host.processors_of(info, rows.roots, len(rows.requests))
    per_row = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias")
    present = [name for name in per_row if getattr(info, name) is not None]
    return dataclasses.replace(
        info,
        **{name: getattr(info, name)[rows.index] for name in present},
        **_sampling_steps(info, [batch.reqs[r].sampling_params for r in dict.fromkeys(rows.requests)]),
        has_custom_logit_processor=bool(processors),
        custom_logit_processor=processors or None,
        custom_params=[info.custom_params[r] for r in rows.requests] if processors else None,
        grammar_mask=rows.grammar_mask,
        grammars=None,
        penalizer_orchestrator=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
    )


def _sampling_steps(
    info: SamplingBatchInfo, params: Sequence[SamplingParams]
) -> dict[str, bool | int | None]:
    """Which sampling steps the rows need: fewer than the batch's where greedy requests are sampled apart."""
    top_ks = [p.top_k for p in params]
    steps = {"is_all_greedy": max(top_ks) <= 1}
    if info.sampling_seed is not None:
        return steps  # the batch's steps decide which noise a seed yields, so they are kept
    steps |= {
        "need_top_p_sampling": any(p.top_p != 1.0 for p in params),
        "need_top_k_sampling": any(k != TOP_K_ALL for k in top_ks),
        "need_min_p_sampling": any(p.min_p > 0 for p in params),
    }
    return steps | host.widest_top_k(top_ks)


class LogprobRecord:
    """Log-probabilities of the accepted tokens, as plain decoding's sampler reported them at each accepted node."""

    def __init__(self, batch: ScheduleBatch):
        self._batch_size = len(batch.reqs)
        self._entries: dict[tuple[int, int], tuple[LogitsProcessorOutput, int]] = {}

    def add(self, output: LogitsProcessorOutput, rows: Sequence[tuple[int, int, int]]) -> None:
        """Keep rows of a sampler's output, each as (request, index among its accepted tokens, row)."""
        for request, step, row in rows:
            self._entries[request, step] = (output, row)

    def write_to(self, logits_output: LogitsProcessorOutput, width: int) -> None:
        """Fill the logprob fields in the layout the scheduler reads: ``[requests, width]``, lists flattened."""
        device = logits_output.next_token_logits.device
        logprobs = torch.zeros(self._batch_size, width, dtype=torch.float32, device=device)
        for (request, step), (output, row) in self._entries.items():
            logprobs[request, step] = output.next_token_logprobs[row]
        logits_output.next_token_logprobs = logprobs
        for field in (
            "next_token_top_logprobs_val",
            "next_token_top_logprobs_idx",
            "next_token_token_ids_logprobs_val",
            "next_token_token_ids_logprobs_idx",
        ):
            setattr(logits_output, field, self._flatten(field, width))

    def _flatten(self, field: str, width: int) -> list | None:
        values = {
            key: getattr(out, field)[row] for key, (out, row) in self._entries.items() if getattr(out, field)
        }
        if not values:
            return None
        # The scheduler calls tolist() on every entry except token_ids_logprobs_idx, whose entries are lists.
        example = next(iter(values.values()))
        filler = example[:0]
        return [values.get((r, s), filler) for r in range(self._batch_size) for s in range(width)]
