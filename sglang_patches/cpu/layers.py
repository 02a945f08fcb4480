"""Fast paths for the layers that dominate a small step on the CPU.

Each function wraps the layer's stock torch path (`HookType.AROUND`): it takes over for the common case, few rows in
float32 or bfloat16, and calls the stock path for everything else. Both accumulate in float32.
"""

from collections.abc import Callable

import torch

from sglang_patches.cpu import kernels, packed_weights
from sglang_patches.host.versions import host

# Above this many rows torch's parallel loops beat one core. Up to it a row's rounding does not depend on the other rows.
MAX_ROWS = 128


def _is_small(x: torch.Tensor) -> bool:
    return x.dim() == 2 and 0 < x.shape[0] <= MAX_ROWS and x.dtype in kernels.RMS_NORM


def _is_plain_norm(norm, x, residual, post_residual_addition) -> bool:
    return (
        _is_small(x)
        and post_residual_addition is None
        and norm.weight.dtype == x.dtype
        and norm.hidden_size == x.shape[1]
        and norm.variance_size_override is None
        and norm.override_orig_dtype is None
        and not (norm.cast_x_before_out_mul or norm.fp32_residual)
        and x.is_contiguous()
        and (residual is None or (residual.is_contiguous() and residual.dtype == x.dtype))
    )


def rms_norm(stock, norm, x, residual=None, post_residual_addition=None, *more, **named):
    """RMSNorm.forward_native: x / rms(x) * weight, of x + residual where one is given (updated in place)."""
    if not _is_plain_norm(norm, x, residual, post_residual_addition):
        return stock(norm, x, residual, post_residual_addition, *more, **named)
    out = torch.empty_like(x)
    rows, width = x.shape
    kernel = (kernels.RMS_NORM if residual is None else kernels.ADD_RMS_NORM)[x.dtype]
    at_residual = 0 if residual is None else residual.data_ptr()
    kernel(
        x.data_ptr(), at_residual, norm.weight.data_ptr(), out.data_ptr(), rows, width, norm.variance_epsilon
    )
    return out if residual is None else (out, residual)


def _is_plain_rope(rope, positions, query, key) -> bool:
    cache = rope.cos_sin_cache
    return (
        _is_small(query)
        and key.dim() == 2
        and query.stride(1) == key.stride(1) == 1
        and positions.dim() == 1
        and positions.dtype == torch.int64
        and positions.is_contiguous()
        and query.dtype == key.dtype == cache.dtype
        and cache.is_contiguous()
        and not hasattr(rope, "sin_cos_cache")
    )


def rope(stock, rope, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
    """RotaryEmbedding.forward_native: rotates query and key in place, as SGLang's GPU kernel does."""
    if (
        offsets is not None
        or fused_set_kv_buffer_arg is not None
        or not _is_plain_rope(rope, positions, query, key)
    ):
        return stock(rope, positions, query, key, offsets, fused_set_kv_buffer_arg)
    cache = rope.cos_sin_cache
    kernel = kernels.ROPE[query.dtype]
    for x in (query, key):
        kernel(
            x.data_ptr(),
            x.stride(0),
            x.shape[1] // rope.head_size,
            rope.head_size,
            cache.data_ptr(),
            cache.shape[0],
            rope.rotary_dim,
            positions.data_ptr(),
            x.shape[0],
            rope.is_neox_style,
        )
    return query, key


# A prefill's rows amortise the layout by themselves.
_PACKED_ROWS = 128


def _takes_packed(x, weight) -> bool:
    return (
        x.dim() == 2
        and 0 < x.shape[0] <= _PACKED_ROWS
        and x.dtype == weight.dtype
        and x.is_contiguous()
        and packed_weights.can_pack(x.dtype)
    )


def linear(stock, method, layer, x, bias=None):
    """UnquantizedLinearMethod.apply: x @ weight.T + bias."""
    if not _takes_packed(x, layer.weight):
        return stock(method, layer, x, bias)
    return packed_weights.multiply(x, layer, layer.weight, bias)


def lm_head(stock, processor, hidden_states, lm_head, embedding_bias=None, **output):
    """LogitsProcessor._compute_lm_head for a plain head (no adapter, no quantisation, no output buffer)."""
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    weight = getattr(lm_head, "weight", None)
    is_plain = (
        output.get("out") is None
        and embedding_bias is None
        and weight is not None
        and not hasattr(lm_head, "apply_lora")
        and not should_apply_lm_head_quant_method(lm_head, getattr(lm_head, "quant_method", None))
    )
    if not (is_plain and _takes_packed(hidden_states, weight)):
        return stock(processor, hidden_states, lm_head, embedding_bias, **output)
    return packed_weights.multiply(hidden_states, lm_head, weight)


HOOKS: dict[str, Callable] = {
    host.RMS_NORM: rms_norm,
    "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native": rope,
    "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply": linear,
    "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head": lm_head,
}

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."
WEIGHT_UPDATES = (
    _UPDATER + "update_weights_from_disk",
    _UPDATER + "update_weights_from_tensor",
    _UPDATER + "update_weights_from_ipc",
    host.DISTRIBUTED_UPDATE,
)
