"""SGLang's model runner for a draft model, alone in a process."""

from __future__ import annotations

import socket

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs

from sglang_patches.draft_process.settings import DraftSettings
from sglang_patches.host.versions import host

CHUNK = 256  # tokens of a prompt between two draft forwards
FALLBACK = "triton"  # in place of a default of SGLang's whose KV has pages
_ON_A_CPU: dict[str, object] = {"attention_backend": "specstore_cpu", "sampling_backend": "pytorch"}
_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def load_runner(settings: DraftSettings) -> ModelRunner:
    """Loads the model and takes memory for its KV. Raises what SGLang raises for a model that it cannot load."""
    args = server_args(settings)
    gpu, port = _index(settings.device), _free_port()
    config = ModelConfig.from_server_args(args)
    refuse_unsupported(config)
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


def server_args(settings: DraftSettings) -> ServerArgs:
    """The draft model's, resolved. Raises ValueError for an attention backend whose KV has pages, and what SGLang raises."""
    config = ModelConfig.from_server_args(_resolved(settings, {}))
    further: dict[str, object] = {"context_length": min(config.context_len, settings.context_length)}
    if settings.quantization and config.quantization is None:
        further["quantization"] = settings.quantization
    args = _resolved(settings, further)
    view = resolved_view(args)
    if view.page_size == 1:
        return args
    named = [str(settings.arguments[field]) for field in _BACKENDS if field in settings.arguments]
    if named:
        raise ValueError(
            f"the draft model's attention backend, {' and '.join(named)}, keeps KV in pages of {view.page_size} tokens, and a draft "
            f"model's KV has no pages: give --speculative-draft-attention-backend {FALLBACK}"
        )
    return _resolved(settings, further | {"attention_backend": FALLBACK})


def _resolved(settings: DraftSettings, further: dict[str, object]) -> ServerArgs:
    kind = settings.device.partition(":")[0]
    args = ServerArgs(
        **(_ON_A_CPU if kind == "cpu" else {}) | settings.arguments | further,
        device=kind,
        base_gpu_id=_index(settings.device),
        page_size=1,
        max_total_tokens=settings.tokens,
        max_running_requests=settings.sessions + settings.rows,
        # On a GPU graphs are captured up to these sizes: no forward is larger.
        chunked_prefill_size=CHUNK,
        cuda_graph_max_bs_decode=settings.rows,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
    )
    host.resolve(args)
    return args


def described_graphs(runner: ModelRunner) -> str:
    """Which of the draft model's forwards replay captured graphs, for the log."""
    decode = getattr(runner.decode_cuda_graph_runner, "capture_bs", ())
    prefill = getattr(runner.prefill_cuda_graph_runner, "capture_num_tokens", ())
    rows = ", ".join(map(str, decode))
    return (
        f"forwards {f'replay graphs of {rows} rows, and those between are padded' if rows else 'run without graphs'}; "
        f"prefills {f'replay graphs of up to {max(prefill)} tokens' if prefill else 'run without graphs'}"
    )


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def refuse_unsupported(config: ModelConfig) -> None:
    """Raises ValueError for a model whose KV cache is not one slot a token and layer, or whose positions are not one number a token."""
    kinds = {
        "multi-head latent attention": config.attention_arch != AttentionArch.MHA,
        "a KV cache of its own for a sliding window": config.is_hybrid_swa,
        "a recurrent state": mambaish_config(config) is not None,
        "positions in several dimensions (mrope)": config.model_is_mrope,
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
