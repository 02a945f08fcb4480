"""SGLang on a CPU without vendor kernels: the operators, attention and layers stock SGLang lacks there.

`install()` is the only entry point; without it nothing here is imported.
"""

import os
from collections.abc import Callable

ATTENTION_BACKEND = "specstore_cpu"
# Attribute of a verification's input: rows of each request, where they differ.
ROWS_BY_REQUEST = "specstore_rows_by_request"

# SGLang compiles these at the first request, with a C++ compiler, which not every machine has. They are a few operations on small
# tensors: which token ids a tensor-parallel rank's part of the embedding has, and with which tokens a head's tree goes on.
COMPILED = (
    "sglang.srt.layers.vocab_parallel_embedding.get_masked_input_and_mask",
    "sglang.srt.speculative.spec_utils._select_top_k_tokens_later",
)

_installed = False


def install() -> None:
    """Make stock SGLang serve on this CPU. Idempotent; call it while plugins load, in every process.

    Without a GPU, SGLang's kernel package imports the operators from `common_ops`. Where its compiled library loads, as for a draft
    model on the CPU of a host with a GPU, it does not, and they are registered here.
    """
    global _installed
    if _installed:
        return
    _installed = True
    # Otherwise a prefill instance waits for the KV of a cached prefix with a CUDA event.
    os.environ.setdefault("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")
    _register_operators()
    _register_attention_backend()
    _register_hooks()


def _register_operators() -> None:
    from sglang_patches.cpu import library

    library.register()


def _register_attention_backend() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices([ATTENTION_BACKEND])

    @register_attention_backend(ATTENTION_BACKEND)
    def create(model_runner):
        from sglang_patches.cpu.attention_backend import CpuTreeAttention

        return CpuTreeAttention(model_runner)


def _prefer_attention_backend(server_args) -> None:
    """Runs before SGLang picks an attention backend for the CPU; picks ours, unless the user named one."""
    from sglang.srt.arg_groups.overrides import resolved_view

    from sglang_patches.host.versions import host

    settings = resolved_view(server_args)
    if settings.device == "cpu" and settings.attention_backend is None:
        host.declare(server_args, attention_backend=ATTENTION_BACKEND)


def _send_indices_plainly(kv_class: type | None, *_: object) -> None:
    """Keeps the indices out of pinned memory: a KV sender would wait for them with a CUDA event."""
    if kv_class is not None and getattr(kv_class, "supports_host_tensor_indices", False):
        setattr(kv_class, "supports_host_tensor_indices", False)  # noqa: B010 - `type` does not declare it


def _last_slots_in_torch(stock: Callable, *arguments: object) -> object:
    """Replaces the Triton kernel that finds each request's last slot in paged allocation. SGLang does so for torch_native only."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(*arguments)


def _without_nccl(stock: Callable, *arguments: object, **named: object) -> object:
    """A group of tensor-parallel ranks on a CPU. SGLang would have it exchange tensors by NCCL wherever that library loads, as it
    does beside torch's usual build, and NCCL takes no tensors of a CPU."""
    return stock(*arguments, **named | {"use_pynccl": False})


def _without_compiling(stock: Callable, *arguments: object, **named: object) -> object:
    import torch

    with torch.compiler.set_stance("force_eager"):
        return stock(*arguments, **named)


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookType

    from sglang_patches.cpu import draft_steps
    from sglang_patches.cpu.layers import HOOKS, WEIGHT_UPDATES
    from sglang_patches.cpu.packed_weights import forget_all
    from sglang_patches.host import hooks
    from sglang_patches.host.versions import host

    hooks.register(HOOKS | draft_steps.HOOKS | host.CPU_HOOKS, HookType.AROUND)
    hooks.register({"sglang.srt.mem_cache.allocation.get_last_loc": _last_slots_in_torch}, HookType.AROUND)
    groups = "sglang.srt.distributed.parallel_state.init_model_parallel_group"
    hooks.register({groups: _without_nccl}, HookType.AROUND)
    hooks.register(dict.fromkeys(COMPILED, _without_compiling), HookType.AROUND)
    hooks.register(dict.fromkeys(WEIGHT_UPDATES, forget_all), HookType.AFTER)
    hooks.register({host.CPU_BACKENDS: _prefer_attention_backend}, HookType.BEFORE)
    hooks.register({"sglang.srt.disaggregation.utils.get_kv_class": _send_indices_plainly}, HookType.AFTER)
