"""SGLang's model runner for a draft model, alone in a process."""

from __future__ import annotations

import socket

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs

from sglang_patches.drafting.process.settings import DraftSettings
from sglang_patches.versions import host

CHUNK = 256  # tokens of a prompt between two draft forwards


def load_runner(settings: DraftSettings) -> ModelRunner:
    """Loads the model and takes memory for its KV. Raises what SGLang raises for a model that it cannot load."""
    kind, _, index = settings.device.partition(":")
    args = ServerArgs(
        model_path=settings.model_path,
        device=kind,
        base_gpu_id=int(index or 0),
        dtype=settings.dtype,
        trust_remote_code=settings.trust_remote_code,
        page_size=1,
        max_total_tokens=settings.tokens,
        max_running_requests=settings.sessions + settings.rows,
        chunked_prefill_size=CHUNK,  # on a GPU graphs are captured for batches up to it
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
        **({"attention_backend": "specstore_cpu", "sampling_backend": "pytorch"} if kind == "cpu" else {}),
    )
    host.resolve(args)
    gpu, port = int(index or 0), _free_port()
    own = ModelConfig.from_server_args(args).context_len
    host.declare(args, context_length=min(own, settings.context_length))
    config = ModelConfig.from_server_args(args)
    _refuse_other_caches(config)
    rank = host.start_rank(args, config, gpu, port)
    runner = ModelRunner(
        model_config=config,
        mem_fraction_static=resolved_view(args).mem_fraction_static,
        gpu_id=gpu,
        nccl_port=port,
        server_args=args,
        **rank,
    )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    return runner


def _refuse_other_caches(config: ModelConfig) -> None:
    """Raises ValueError for a model whose KV cache is not one slot a token and layer."""
    kinds = {
        "multi-head latent attention": config.attention_arch != AttentionArch.MHA,
        "a KV cache of its own for a sliding window": config.is_hybrid_swa,
        "a recurrent state": mambaish_config(config) is not None,
    }
    for kind, has in kinds.items():
        if has:
            raise ValueError(
                f"--speculative-draft-model-path {config.model_path}: a draft model with {kind} is not supported yet"
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
