"""SGLang 0.5.23."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_patches.host.versions.rows import row

if TYPE_CHECKING:
    import torch
    from sglang.srt.arg_groups.overrides import ResolvedView
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

ABORT = "sglang.srt.managers.scheduler.Scheduler.send_abort_output"
STREAMER = "sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class"
META_INFO = "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info"
CPU_BACKENDS = "sglang.srt.arg_groups.platform_hook.handle_cpu_backends"
ACCEPT_RATE = (
    "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.update_spec_metrics"
)
DISTRIBUTED_UPDATE = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.load_weights_from_distributed"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
WEIGHTS_LOADED = _UPDATER + "flush_cache_after_weight_update"
# Called when weights have changed; the second one after those that a trainer has written into this process's memory.
WEIGHT_UPDATES = (WEIGHTS_LOADED, _UPDATER + "end_weight_update")

RMS_NORM = "sglang.srt.layers.layernorm.RMSNorm.forward_native"
ROW_LENGTH = "sglang.srt.mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len"
RESERVE = "sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode"
REQUEST_STATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._init_req_state"
FIRST_DRAFT_INPUT = "sglang.srt.speculative.spec_registry.CustomSpecAlgo.build_disagg_draft_input"

_OVERRIDES = "sglang.srt.arg_groups.overrides."
_TELLS = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer."
_RANK = "the draft model's process"

logger = logging.getLogger(__name__)

RESOLUTION_HOOKS: dict[str, Callable] = {}  # called before settings are resolved
SCHEDULER_HOOKS: dict[str, Callable] = {}  # called after these, in the scheduler's process
CPU_HOOKS: dict[str, Callable] = {}  # called around these, on a CPU alone
COUNTS_CORRECT_DRAFTS = True  # its report of the acceptance rate does so apart from the accepted tokens
# There is no pinned memory to keep a retracted request's KV in.
CPU_DECODE_FLAGS: tuple[str, ...] = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
EARLY_EXITS = True  # layers can be asked for their hidden states
GRAMMARS_TAKE_NUL = True
HEADS = True  # retrieval can stand beside a model's own head
# Fields -> the one value that all methods work with.
ONLY_SUPPORTED = {"enable_watermark": False, "enable_pd_role_switch": False}

_HEAD = "a model's own head"
_DRAFTS = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker."
_INPUTS = "sglang.srt.speculative.eagle_info."
# What retrieval beside a head takes of SGLang.
HEAD_ROWS = (
    row(
        "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.__init__",
        "self server_args gpu_id nccl_port target_worker",
        _HEAD,
    ),
    row(
        "sglang.srt.speculative.standalone_worker_v2.StandaloneWorkerV2.__init__",
        "self server_args gpu_id nccl_port target_worker",
        _HEAD,
    ),
    row(
        "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2._forward_prefill_batch",
        "self batch on_publish pp_proxy_tensors coordination_plan",
        "the head reads a prompt",
    ),
    row(_DRAFTS + "draft", "self batch with_topology", "the head drafts"),
    row(
        _DRAFTS + "_draft_extend_for_decode",
        "self batch batch_result kv_loc_plan",
        "the head follows what the target accepted",
    ),
    row(_INPUTS + "EagleDraftInput.__init__", None, "what the head goes on from"),
    row(_INPUTS + "EagleVerifyInput.__init__", None, "the trees that are verified"),
    row(_INPUTS + "EagleVerifyInput.tree_topk", None, "overridden: trees of any shape"),
    row("sglang.srt.speculative.spec_utils.draft_tp_context", "layout", _HEAD),
    row("sglang.srt.layers.moe.utils.speculative_moe_backend_context", "", _HEAD),
    row("sglang.srt.layers.moe.utils.speculative_moe_a2a_backend_context", "", _HEAD),
    row(
        "sglang.srt.model_executor.forward_batch_info.CaptureHiddenMode", None, "the states that a head reads"
    ),
    row("sglang.srt.speculative.spec_info.SpeculativeAlgorithm.is_standalone", "self", _HEAD),
)

ROWS = (
    *HEAD_ROWS,
    row(
        ACCEPT_RATE,
        "self bs num_correct_drafts num_accept_tokens num_block_accept_tokens num_cap_tokens",
        "hooked: the acceptance rate is of verified tokens",
    ),
    row(STREAMER, "self", "hooked: an answer has our field"),
    row(_TELLS + "build_additional_customized_info", "self reqs", "overridden: our field"),
    row(_TELLS + "has_additional_customized_info", None, "overridden: there is a field"),
    row(
        META_INFO,
        "self meta_info state customized_info index finish_reason",
        "hooked: our field is no list",
    ),
    row(_OVERRIDES + "declare_resolution", "server_args source fields", "changes settings"),
    row(_OVERRIDES + "model_config_of", "server_args", "what kind of attention a model has"),
    row("sglang.srt.server_args.ServerArgs.resolve_once", "self", _RANK),
    row("sglang.srt.server_args.add_attention_backend_choices", "iterable", "names our attention backend"),
    row(
        RMS_NORM,
        "self x residual post_residual_addition quant_linear",
        "hooked on a CPU: fast path for few rows",
    ),
    row("sglang.srt.runtime_context.attention_backends", "", "the backends of this process"),
    row(ROW_LENGTH, "", "hooked: a request's row holds what is reserved for it"),
    row(RESERVE, "", "what is reserved"),
    row(REQUEST_STATE, "self obj request", "hooked: tenant and conversation of a request"),
    row(
        FIRST_DRAFT_INPUT,
        "self batch last_tokens_tensor future_map",
        "overridden: first draft input on a decode instance",
    ),
    row(
        "sglang.srt.managers.overlap_utils.FutureMap.stash",
        "self future_indices payload",
        "first tokens of requests that another instance has prefilled",
    ),
    row("sglang.srt.managers.overlap_utils.RelayPayload.from_ngram", "draft_input", "as above"),
    row(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.after_idle_gap",
        None,
        "which steps say what a width costs",
    ),
    row(CPU_BACKENDS, "server_args", "hooked on a CPU: our attention backend"),
    row("sglang.srt.mem_cache.allocation_sizing.get_alloc_page_size", "", "what is reserved"),
    row(ABORT, "self abort_req req", "hooked: closes the session of a request that ends while it waits"),
    row(
        "sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func",
        "predicts accept_index accept_token_num candidates retrieve_index retrieve_next_token retrieve_next_sibling "
        "target_predict topk",
        "walks the verified tree on an accelerator",
    ),
    row(
        "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        "self hidden_states lm_head embedding_bias out",
        "hooked on a CPU: fast path for few rows; timed at start",
    ),
    row(
        "sglang.srt.model_executor.forward_context.forward_context",
        "ctx forward_batch",
        "which backend serves the probe of tree attention",
    ),
    row(
        "sglang.srt.speculative.spec_utils.commit_mamba_states_after_verify",
        "target_worker batch accept_lens accept_index draft_token_num prepared_step_indices",
        "hybrid models",
    ),
    # A model whose layers have no `capture_output` is refused when it is loaded.
    row(
        "sglang.srt.models.llama.LlamaDecoderLayer.forward",
        "self positions hidden_states forward_batch capture_output",
        "hands out the hidden states in the middle of a forward",
    ),
    row(
        "sglang.srt.layers.sampler.Sampler.forward",
        "self logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs positions logprob_logits",
        "the target's own sampling, at every node",
    ),
    row(
        "sglang.srt.mem_cache.memory_pool.KVWriteLoc.__init__",
        "self loc swa_loc full_loc physical",
        "slots that a step writes",
    ),
    row("sglang.srt.runtime_context.attn_dp_enabled_of", "cfg", "data-parallel attention is refused"),
    row("sglang.srt.server_args.ServerArgs.enable_watermark", None, "is refused"),
    row("sglang.srt.server_args.ServerArgs.enable_pd_role_switch", None, "is refused"),
    row("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.max_top_k", None, "a top-k of fewer rows"),
    row(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.has_watermark_candidates",
        None,
        "watermarks are refused",
    ),
    row(
        "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.own_plan",
        "self forward_batch runner_slots",
        "KV slots of batches that the plugin makes",
    ),
    row(
        "sglang.srt.layers.aux_hidden_states.AuxHiddenStateList.capture",
        "self hidden owned",
        "what is called with the hidden states at an early exit",
    ),
    row("sglang.srt.sampling.sampling_batch_info.ProcessorEntry.__init__", None, "custom logit processors"),
    row(
        "sglang.srt.configs.hybrid_arch.hybrid_kda_config",
        "model_config",
        "which linear-attention layers a model has",
    ),
    row(WEIGHTS_LOADED, "self recv_req success message", "hooked: an update of the weights begins an epoch"),
    row(WEIGHT_UPDATES[1], "self recv_req", "as above"),
    row(DISTRIBUTED_UPDATE, None, "hooked on a CPU: packed weights are made again"),
    row("sglang.srt.distributed.bootstrap.init_parallel_runtime", "server_args device dist_port", _RANK),
    row("sglang.srt.distributed.bootstrap.init_layer_runtime", "model_config", _RANK),
    row("sglang.srt.runtime_context.SpawnRanks", None, _RANK),
    row("sglang.srt.runtime_context.publish", "server_args role hf_config ranks", _RANK),
)


def aborted(scheduler: Scheduler, abort_req: AbortReq, req: Req) -> Req | None:
    """The request that a call of `ABORT` ends."""
    return req


def declare(args: ServerArgs, **fields: object) -> None:
    """Changes settings while they are resolved."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(args, "specstore", **fields)


def resolve(args: ServerArgs) -> None:
    """Fills in the settings that were not given."""
    args.resolve_once()


def model_config_of(args: ServerArgs) -> ModelConfig:
    """The configuration of the served model, while settings are resolved."""
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(args)


def reserve_per_decode() -> tuple[int, int]:
    """Tokens that are reserved for a request at each decode step, and those of a page. The configuration must be published."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size, get_alloc_reserve_per_decode

    return get_alloc_reserve_per_decode(), get_alloc_page_size()


def teller(field: str, summary_of: Callable[[Req], list]) -> Callable:
    """What to call after `STREAMER`, so that messages to the process that answers have a further field. summary_of: a request's
    entry, empty if there is none."""

    def after_streamer_class(
        base: type[SchedulerOutputStreamer], scheduler: Scheduler
    ) -> type[SchedulerOutputStreamer]:
        if scheduler.rust_server is not None:
            logger.warning(
                "specstore: SGLang's Rust server takes no further fields: meta_info has no `%s`", field
            )
            return base

        def told(self: SchedulerOutputStreamer, reqs: list[Req]) -> dict[str, list]:
            entries = [summary_of(req) for req in reqs]
            return base.build_additional_customized_info(self, reqs) | (
                {field: entries} if any(entries) else {}
            )

        # The base is a dataclass with slots, which finds its own fields in any subclass.
        members = {"has_additional_customized_info": True, "build_additional_customized_info": told}
        return type(f"{base.__name__}WithUsage", (base,), {"__slots__": ()} | members)

    return after_streamer_class


def meta_info_hooks(field: str) -> dict[str, Callable]:
    """What to call around functions of the process that answers, so that an entry of the field gets into `meta_info`."""

    def around_meta_info(
        original: Callable,
        manager: TokenizerManager,
        meta_info: dict[str, Any],
        state: object,
        customized_info: dict[str, list],
        index: int,
        finish_reason: dict | None,
    ) -> None:
        # SGLang takes the other fields for lists with an entry a token, which it joins and cuts.
        others = {name: values for name, values in customized_info.items() if name != field}
        original(manager, meta_info, state, others, index, finish_reason)
        for entry in customized_info.get(field, {index: ()})[index]:
            meta_info[field] = entry

    return {META_INFO: around_meta_info}


def put_told(field: str, meta_info: dict[str, Any], message: object, index: int) -> None:
    """Does nothing: the hook of `meta_info_hooks` has put the entry into `meta_info` already."""


def attention_is_data_parallel(view: ResolvedView) -> bool:
    """Whether ranks share the attention by requests."""
    from sglang.srt.runtime_context import attn_dp_enabled_of

    return attn_dp_enabled_of(view)


def tree_walk() -> Callable:
    """The kernel that walks a verified tree."""
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func

    return verify_tree_greedy_func


def hybrid_kda_config(config: ModelConfig) -> object | None:
    """The configuration of a model with KDA layers, None for another model."""
    from sglang.srt.configs.hybrid_arch import hybrid_kda_config

    return hybrid_kda_config(config)


def watermarked(info: SamplingBatchInfo) -> bool:
    """Whether the output of a request may carry a watermark."""
    return info.has_watermark_candidates


def widest_top_k(top_ks: Sequence[int]) -> dict[str, int | None]:
    """The field of `SamplingBatchInfo` that says which columns a top-k may keep, for rows with these."""
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    return {"max_top_k": max(top_ks) if max(top_ks) < TOP_K_ALL else None}


def processors_of(info: SamplingBatchInfo, rows: Mapping[int, int], count: int) -> dict:
    """The custom logit processors of requests that have one row of logits each, of `count` rows. rows: of these requests, by request."""
    import torch
    from sglang.srt.sampling.sampling_batch_info import ProcessorEntry

    entries = {}
    for key, entry in (info.custom_logit_processor or {}).items():
        seen = sorted(rows[request] for request in entry.rows if request in rows)
        if seen:
            indices = torch.tensor(seen, device=info.temperatures.device)
            entries[key] = ProcessorEntry(entry.processor, seen, indices)
    return entries


def as_draw(tokens: torch.Tensor) -> object:
    """Drawn tokens as `Sampler._sample_from_probs` returns them: with the tokens that could have been drawn, if a request asks."""
    return tokens, None


def drawn(result: Any) -> torch.Tensor:
    """The tokens in such a result."""
    return result[0]


def attention_backends() -> tuple[str, str]:
    """The attention backends of prefill and decode in this process. The configuration must be published."""
    from sglang.srt.runtime_context import attention_backends

    return attention_backends()


def follows_idle_gap(batch: ScheduleBatch) -> bool:
    """Whether the scheduler had nothing to do before this step."""
    return batch.after_idle_gap


def relay(draft_input: NgramVerifyInput, future_map: FutureMap) -> None:
    """Hands accepted tokens to the next step under overlap scheduling, as after a step."""
    from sglang.srt.managers.overlap_utils import RelayPayload

    future_map.stash(draft_input.future_indices, RelayPayload.from_ngram(draft_input))


def place_kv(runner: ModelRunner, batch: ForwardBatch) -> None:
    """Tells the batch where its slots lie, as the scheduler does for its own batches."""
    translator = runner.kv_index_translator
    translator.own_plan(batch).bind(batch, translator)


def replica_of(runner: ModelRunner) -> int | None:
    """Which of the data-parallel replicas this is, None without them."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().dp_rank


def start_rank(args: ServerArgs, config: ModelConfig, gpu: int, port: int) -> dict[str, object]:
    """Makes this process the one rank of a model; returns further arguments of its `ModelRunner`. args: resolved. port: free."""
    from sglang.srt.distributed import bootstrap
    from sglang.srt.runtime_context import SpawnRanks, get_device, publish

    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=gpu))
    bootstrap.init_parallel_runtime(server_args=args, device=get_device().device, dist_port=port)
    bootstrap.init_layer_runtime(model_config=config)
    return {}


def worker_class(worker: type[BaseSpecWorker]) -> type[BaseSpecWorker]:
    """The class that the scheduler makes its worker of."""
    return worker
