"""The SGLang side of `attention`: turns a ForwardBatch into a step plan and serves RadixAttention layers."""

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_patches.cpu import ROWS_BY_REQUEST
from sglang_patches.cpu.attention import Group, attend, plan_step

_KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _refuse(what: str) -> None:
    raise NotImplementedError(
        f"specstore: attention backend specstore_cpu does not support {what};"
        " choose another with --attention-backend"
    )


class CpuTreeAttention(AttentionBackend):
    """Decode, prefill with cached prefix and tree verification by scaled-dot-product attention over KV slots."""

    def __init__(self, model_runner):
        super().__init__()
        if model_runner.use_mla_backend:
            _refuse("multi-head latent attention (MLA) models")
        if model_runner.kv_cache_dtype not in _KV_DTYPES:
            _refuse(f"KV cache dtype {model_runner.kv_cache_dtype}")
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.plan: list[Group] = []
        self.write_loc = None
        self.has_window_pool = isinstance(self.token_to_kv_pool, SWAKVPool)
        self._window_plan: list[Group] | None = None
        # The window pool has its own slot numbers. An unused slot has no translation there, so none is read beyond a request's own.
        pool = self.token_to_kv_pool
        self.slot_count = 0 if self.has_window_pool else pool.size + pool.page_size

    def init_forward_metadata(self, forward_batch):
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        if forward_batch.encoder_lens is not None:
            _refuse("encoder-decoder models")
        self._plan_step(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            *_query_layout(forward_batch),
            locs=forward_batch.out_cache_loc,
            widths=getattr(forward_batch.spec_info, ROWS_BY_REQUEST, None),
        )

    def plan_decode(self, table, lengths, locs):
        """Prepares a decode forward of one token behind each row of `table`, a table as of `req_to_token`. The rows have `lengths` cached
        tokens, and the new ones take the slots `locs`."""
        self._plan_step(table, torch.arange(len(table)), lengths.tolist(), 1, lengths, None, locs=locs)

    def _plan_step(self, table, requests, prefixes, rows, positions, custom_mask, locs, widths=None):
        self.plan = plan_step(
            table,
            requests,
            prefixes,
            rows,
            positions,
            custom_mask,
            slot_count=self.slot_count,
            widths=widths,
        )
        self._window_plan = None
        window_locs = None
        if self.has_window_pool:
            window_locs = self.token_to_kv_pool.translate_loc_from_full_to_swa(locs)
        self.write_loc = KVWriteLoc(locs, window_locs)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return self._forward(q, k, v, layer, save_kv_cache, kwargs)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return self._forward(q, k, v, layer, save_kv_cache, kwargs)

    def support_triton(self):
        return False

    def _forward(self, q, k, v, layer, save_kv_cache, extras):
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            _refuse("cross attention or bidirectional attention")
        unknown = [name for name, value in extras.items() if value is not None]
        if unknown:
            _refuse(f"attention arguments {unknown}")
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, self.write_loc, k, v)
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        plan = self._plan_for(layer)
        if len(plan) == 1 and plan[0].query_rows is None:
            return self._attend(query, keys, values, plan[0], layer)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        for group in plan:
            group.place(out, self._attend(query[group.query_rows], keys, values, group, layer))
        return out

    @staticmethod
    def _attend(query, keys, values, group, layer):
        return attend(query, keys, values, group, layer.scaling, layer.sliding_window_size, layer.logit_cap)

    def _plan_for(self, layer):
        if not (self.has_window_pool and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]):
            return self.plan
        if self._window_plan is None:
            translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
            self._window_plan = [_translated(group, translate) for group in self.plan]
        return self._window_plan


def _translated(group: Group, translate) -> Group:
    """The group with its KV slots in the sliding-window pool's numbering."""
    slots = group.slots
    if isinstance(slots, slice):
        slots = torch.arange(slots.start, slots.stop).unsqueeze(0)
    return Group(**{**vars(group), "slots": translate(slots).long(), "_masks": {}})


def _query_layout(batch):
    """(prefixes, rows, positions, custom_mask) of `plan_step` for a forward batch."""
    mode = batch.forward_mode
    lengths = batch.seq_lens.tolist()
    if mode.is_target_verify():
        info = batch.spec_info
        return lengths, info.draft_token_num, batch.positions, info.custom_mask
    if mode.is_decode():
        return [length - 1 for length in lengths], 1, batch.positions, None
    if mode.is_draft_extend_v2():  # the same number of rows for each request
        rows = batch.spec_info.num_tokens_per_req
        return [length - rows for length in lengths], rows, batch.positions, None
    rows = batch.extend_seq_lens.tolist()
    prefixes = [length - count for length, count in zip(lengths, rows, strict=True)]
    return prefixes, rows, batch.positions, None
