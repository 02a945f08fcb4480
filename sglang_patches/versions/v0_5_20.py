"""SGLang 0.5.20: as 0.5.21, but a process learns its ranks from an object that is handed to all its parts, and a custom logit processor
comes with a mask of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang_patches.versions import v0_5_21
from sglang_patches.versions.rows import changed, row

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

DISTRIBUTED_UPDATE = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_distributed"

ONLY_SUPPORTED: dict[str, object] = {}

_RANK = "the draft model's process"
_WEIGHTS = "overridden: the scheduler asks for an update of the draft model, which it does not have"
_LAYERS = "which linear-attention layers a model has"

ROWS = changed(
    v0_5_21.ROWS,
    row(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.merge_custom_logit_processor",
        "lhs rhs bs1 bs2 device",
        "custom logit processors with masks",
    ),
    row("sglang.srt.configs.hybrid_arch.kimi_linear_config", "model_config", _LAYERS),
    row("sglang.srt.configs.hybrid_arch.glm5_next_config", "model_config", _LAYERS),
    row(DISTRIBUTED_UPDATE, None, "hooked on a CPU: packed weights are made again"),
    row("sglang.srt.distributed.parallel_state_wrapper.ParallelState.trivial", "overrides", _RANK),
    row("sglang.srt.runtime_context.publish", "server_args role hf_config", _RANK),
    row(
        "sglang.srt.speculative.base_spec_worker.BaseSpecWorker.update_weights_from_disk",
        "self recv_req",
        _WEIGHTS,
    ),
    row(
        "sglang.srt.speculative.base_spec_worker.BaseSpecWorker.update_weights_from_ipc",
        "self recv_req",
        _WEIGHTS,
    ),
    row(
        "sglang.srt.managers.tp_worker.TpModelWorker.update_weights_from_tensor",
        "self recv_req",
        "the scheduler asks the speculative worker alone",
    ),
    without=(
        v0_5_21.DISTRIBUTED_UPDATE,
        "sglang.srt.configs.hybrid_arch.hybrid_kda_config",
        "sglang.srt.distributed.bootstrap.init_layer_runtime",
        "sglang.srt.distributed.bootstrap.init_parallel_runtime",
        "sglang.srt.runtime_context.SpawnRanks",
        "sglang.srt.sampling.sampling_batch_info.ProcessorEntry.__init__",
        "sglang.srt.server_args.ServerArgs.enable_pd_role_switch",
    ),
)


def hybrid_kda_config(config: ModelConfig) -> object | None:
    """The configuration of a model with KDA layers, None for another model."""
    from sglang.srt.configs.hybrid_arch import glm5_next_config, kimi_linear_config

    return kimi_linear_config(config) or glm5_next_config(config)


def processors_of(info: SamplingBatchInfo, rows: Mapping[int, int], count: int) -> dict:
    """The custom logit processors of requests that have one row of logits each, of `count` rows. rows: of these requests, by request."""
    import torch

    entries = {}
    for key, (processor, mask) in (info.custom_logit_processor or {}).items():
        seen = [rows[request] for request in mask.nonzero().flatten().tolist() if request in rows]
        if seen:
            taken = torch.zeros(count, dtype=torch.bool)
            taken[seen] = True
            entries[key] = processor, taken.to(mask.device)
    return entries


def replica_of(runner: ModelRunner) -> int | None:
    """Which of the data-parallel replicas this is, None without them."""
    return runner.ps.dp_rank


def start_rank(args: ServerArgs, config: ModelConfig, gpu: int, port: int) -> dict[str, object]:
    """Makes this process the one rank of a model; returns further arguments of its `ModelRunner`, which does the rest. args: resolved.
    port: free."""
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.runtime_context import publish

    publish(args, role="scheduler")
    return {"ps": ParallelState.trivial(gpu_id=gpu)}


def worker_class(worker: type[BaseSpecWorker]) -> type[BaseSpecWorker]:
    """The class that the scheduler makes its worker of: it hands over its ranks, and it has the worker update a draft model's weights
    after the target's, or both."""

    def make(self: BaseSpecWorker, ps: ParallelState, **arguments: Any) -> None:
        worker.__init__(self, **arguments)

    def updated(self: BaseSpecWorker, request: object) -> tuple[bool, str]:
        return True, "Succeeded to update model weights."

    def update_target(self: BaseSpecWorker, request: Any) -> tuple[bool, str]:
        return self.target_worker.update_weights_from_tensor(request)

    methods = {
        "__init__": make,
        "update_weights_from_disk": updated,
        "update_weights_from_ipc": updated,
        "update_weights_from_tensor": update_target,
    }
    return type(worker.__name__, (worker,), methods)


def __getattr__(name: str) -> Any:
    """All else is as in 0.5.21."""
    return getattr(v0_5_21, name)
