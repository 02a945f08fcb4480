"""Registration of the CPU operators in the torch namespace SGLang calls, `torch.ops.sgl_kernel`."""

import functools

import torch
from torch._ops import _OpNamespace

from sglang_patches.cpu import cache_operators, tree_operators

NAMESPACE = "sgl_kernel"

# (a!) marks what an operator writes in place.
_SCHEMAS = {
    cache_operators.assign_extend_cache_locs_cpu: (
        "(Tensor req_pool_indices, Tensor req_to_token, Tensor start_offset, Tensor end_offset,"
        " Tensor(a!) out_cache_loc, int pool_len) -> ()"
    ),
    cache_operators.assign_draft_cache_locs_contiguous_cpu: (
        "(Tensor req_pool_indices, Tensor req_to_token, Tensor seq_lens, Tensor(a!) out_cache_loc,"
        " int pool_len, int topk, int num_steps) -> ()"
    ),
    cache_operators.assign_req_to_token_pool_cpu: (
        "(Tensor req_pool_indices, Tensor(a!) req_to_token, Tensor start_offset, Tensor end_offset,"
        " Tensor out_cache_loc, int pool_len) -> ()"
    ),
    cache_operators.fill_accept_out_cache_loc_cpu: (
        "(Tensor accept_index, Tensor out_cache_loc, Tensor(a!) accept_out_cache_loc) -> ()"
    ),
    cache_operators.fill_bonus_tokens_cpu: (
        "(Tensor accept_tokens, Tensor accept_lens, Tensor(a!) bonus_tokens, int accept_stride) -> ()"
    ),
    cache_operators.copy_all_layer_kv_cache_cpu: (
        "(Tensor data_ptrs, Tensor strides, Tensor tgt_loc, Tensor src_loc) -> ()"
    ),
    cache_operators.rotate_input_ids_cpu: (
        "(Tensor(a!) input_ids, Tensor extend_start_loc, Tensor extend_seq_lens, Tensor topk_index,"
        " Tensor? select_index=None) -> ()"
    ),
    tree_operators.reconstruct_indices_from_tree_mask_cpu: (
        "(Tensor tree_mask, Tensor verified_seq_len, Tensor(a!) positions, Tensor(b!) retrive_index,"
        " Tensor(c!) retrive_next_token, Tensor(d!) retrive_next_sibling, int batch_size,"
        " int draft_token_num) -> ()"
    ),
    tree_operators.verify_tree_greedy_cpu: (
        "(Tensor(a!) predicts, Tensor(b!) accept_index, Tensor(c!) accept_token_num, Tensor candidates,"
        " Tensor retrive_index, Tensor retrive_next_token, Tensor retrive_next_sibling,"
        " Tensor target_predict) -> ()"
    ),
    tree_operators.build_tree_kernel_efficient_cpu: (
        "(Tensor parent_list, Tensor selected_index, Tensor verified_seq_len, Tensor(a!) tree_mask,"
        " Tensor(b!) positions, Tensor(c!) retrive_index, Tensor(d!) retrive_next_token,"
        " Tensor(e!) retrive_next_sibling, int topk, int depth, int draft_token_num,"
        " int tree_mask_mode) -> ()"
    ),
}


class _NamespaceThatNamesMissingOperators(_OpNamespace):
    """A missing operator stays an AttributeError, because SGLang probes with hasattr; the message names specstore."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(f"specstore: CPU operator {NAMESPACE}.{name} is not implemented") from error


@functools.cache  # the operators vanish with it
def register() -> torch.library.Library:
    """Define and implement every operator. Idempotent."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for operator, schema in _SCHEMAS.items():
        library.define(operator.__name__ + schema)
        library.impl(operator.__name__, operator, "CPU")
    getattr(torch.ops, NAMESPACE).__class__ = _NamespaceThatNamesMissingOperators
    return library
