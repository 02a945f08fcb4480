"""SGLang 0.5.17, where it differs from 0.5.23.

Settings are the fields of `ServerArgs`, which is resolved as it is made. Layers hand out no hidden states. Messages to the process that
answers take no further fields, and aborts have no function of their own. Accepted tokens are not relayed, and the scheduler does not say
that it was idle.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_patches.host.versions import v0_5_17_cpu, v0_5_23
from sglang_patches.host.versions.rows import changed, row

if TYPE_CHECKING:
    import torch
    from sglang.srt.arg_groups.overrides import ResolvedView
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
    from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

ABORT = "sglang.srt.managers.scheduler_components.output_sender.SenderWrapper.send_output"
STREAMER = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
CPU_BACKENDS = "sglang.srt.server_args.ServerArgs._handle_cpu_backends"
DISTRIBUTED_UPDATE = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_distributed"
_MESSAGE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_output"
_RESOLUTION = "sglang.srt.server_args.ServerArgs.__post_init__"
_IDLE = "sglang.srt.managers.scheduler.Scheduler.on_idle"
_RANK = "the draft model's process"
_WEIGHTS = "overridden: the scheduler asks for an update of the draft model, which it does not have"

WEIGHT_UPDATES = (v0_5_23.WEIGHTS_LOADED,)
COUNTS_CORRECT_DRAFTS = False
CPU_DECODE_FLAGS: tuple[str, ...] = ()  # a retracted request's KV is always kept in plain memory
CPU_HOOKS = v0_5_17_cpu.CPU_HOOKS
EARLY_EXITS = False
GRAMMARS_TAKE_NUL = False  # its xgrammar, 0.2.1, ends the process
HEADS = False  # retrieval can stand beside a model's own head
ONLY_SUPPORTED: dict[str, object] = {}

ROWS = changed(
    v0_5_23.ROWS,
    *v0_5_17_cpu.ROWS,
    row(ABORT, "self output recv_obj", "hooked: closes the session of a request that ends while it waits"),
    row("sglang.srt.managers.scheduler.AbortReq", None, "as above"),
    row(STREAMER, "self req", "hooked: an answer has our field"),
    row(_MESSAGE, "self recv_obj", "hooked: our field is no list"),
    row("sglang.srt.managers.io_struct.unwrap_from_pickle", "obj", "as above"),
    row("sglang.srt.managers.io_struct.wrap_as_pickle", "obj", "as above"),
    row(CPU_BACKENDS, "self", "hooked on a CPU: our attention backend"),
    row("sglang.srt.server_args.add_attention_backend_choices", "choices", "names our attention backend"),
    row(_RESOLUTION, "self", "hooked: keeps the settings as they were given"),
    row("sglang.srt.server_args.ServerArgs.get_model_config", "self", "what kind of attention a model has"),
    row("sglang.srt.server_args.ServerArgs.get_attention_backends", "self", "the backends of this process"),
    row("sglang.srt.server_args.ServerArgs.enable_dp_attention", None, "data-parallel attention is refused"),
    row("sglang.srt.runtime_context.get_server_args", "", "sizes and backends"),
    row(
        v0_5_23.RMS_NORM,
        "self x residual post_residual_addition",
        "hooked on a CPU: fast path for few rows",
    ),
    row(v0_5_23.ROW_LENGTH, "server_args", "hooked: a request's row holds what is reserved for it"),
    row(v0_5_23.RESERVE, "server_args", "what is reserved"),
    row(
        v0_5_23.REQUEST_STATE, "self obj request lifecycle_id", "hooked: tenant and conversation of a request"
    ),
    row(
        v0_5_23.FIRST_DRAFT_INPUT,
        "self batch server_args last_tokens_tensor future_map",
        "overridden: first draft input on a decode instance",
    ),
    row(_IDLE, "self", "hooked: which steps say what a width costs"),
    row(
        "sglang.srt.speculative.eagle_utils.verify_tree_greedy_func",
        "predicts accept_index accept_token_num candidates retrieve_index retrieve_next_token retrieve_next_sibling "
        "target_predict topk",
        "walks the verified tree on an accelerator",
    ),
    row(
        "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        "self hidden_states lm_head embedding_bias",
        "hooked on a CPU: fast path for few rows; timed at start",
    ),
    row(
        "sglang.srt.model_executor.forward_context.forward_context",
        "ctx",
        "which backend serves the probe of tree attention",
    ),
    row(
        "sglang.srt.speculative.spec_utils.commit_mamba_states_after_verify",
        "target_worker batch accept_lens accept_index draft_token_num",
        "hybrid models",
    ),
    row(
        "sglang.srt.layers.sampler.Sampler.forward",
        "self logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs positions",
        "the target's own sampling, at every node",
    ),
    row(
        "sglang.srt.mem_cache.memory_pool.KVWriteLoc.__init__",
        "self loc swa_loc full_loc",
        "slots that a step writes",
    ),
    row(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.merge_custom_logit_processor",
        "lhs rhs bs1 bs2 device",
        "custom logit processors with masks",
    ),
    row(
        "sglang.srt.configs.hybrid_arch.kimi_linear_config",
        "model_config",
        "which linear-attention layers a model has",
    ),
    row(v0_5_23.WEIGHTS_LOADED, "self recv_req", "hooked: an update of the weights begins an epoch"),
    row(DISTRIBUTED_UPDATE, None, "hooked on a CPU: packed weights are made again"),
    row("sglang.srt.distributed.parallel_state_wrapper.ParallelState.trivial", "overrides", _RANK),
    row("sglang.srt.runtime_context.publish", "server_args role hf_config", _RANK),
    *(
        row("sglang.srt.speculative.base_spec_worker.BaseSpecWorker." + name, "self recv_req", _WEIGHTS)
        for name in ("update_weights_from_disk", "update_weights_from_ipc")
    ),
    row(
        "sglang.srt.managers.tp_worker.TpModelWorker.update_weights_from_tensor",
        "self recv_req",
        "the scheduler asks the speculative worker alone",
    ),
    without=(
        *(each.path for each in v0_5_23.HEAD_ROWS),
        v0_5_23.ABORT,
        v0_5_23.ACCEPT_RATE,
        v0_5_23.CPU_BACKENDS,
        v0_5_23.DISTRIBUTED_UPDATE,
        v0_5_23.WEIGHT_UPDATES[1],
        v0_5_23.META_INFO,
        v0_5_23.STREAMER,
        "sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func",
        "sglang.srt.arg_groups.overrides.declare_resolution",
        "sglang.srt.arg_groups.overrides.model_config_of",
        "sglang.srt.configs.hybrid_arch.hybrid_kda_config",
        "sglang.srt.distributed.bootstrap.init_layer_runtime",
        "sglang.srt.distributed.bootstrap.init_parallel_runtime",
        "sglang.srt.layers.aux_hidden_states.AuxHiddenStateList.capture",
        "sglang.srt.managers.overlap_utils.FutureMap.stash",
        "sglang.srt.managers.overlap_utils.RelayPayload.from_ngram",
        "sglang.srt.managers.schedule_batch.ScheduleBatch.after_idle_gap",
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.build_additional_customized_info",
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.has_additional_customized_info",
        "sglang.srt.mem_cache.allocation_sizing.get_alloc_page_size",
        "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.own_plan",
        "sglang.srt.models.llama.LlamaDecoderLayer.forward",
        "sglang.srt.runtime_context.SpawnRanks",
        "sglang.srt.runtime_context.attention_backends",
        "sglang.srt.runtime_context.attn_dp_enabled_of",
        "sglang.srt.sampling.sampling_batch_info.ProcessorEntry.__init__",
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.has_watermark_candidates",
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.max_top_k",
        "sglang.srt.server_args.ServerArgs.enable_pd_role_switch",
        "sglang.srt.server_args.ServerArgs.enable_watermark",
        "sglang.srt.server_args.ServerArgs.resolve_once",
    ),
)

logger = logging.getLogger(__name__)

_told: dict[str, list] = {}  # the field of the message that is being handled, by request
_idle = False  # since the last step


def keep_given(args: ServerArgs) -> None:
    """Called before settings are resolved: later versions of SGLang keep the given ones by this name."""
    args._raw_input = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}


RESOLUTION_HOOKS: dict[str, Callable] = {_RESOLUTION: keep_given}


def _after_idle(result: None, scheduler: Scheduler) -> None:
    global _idle
    _idle = True


SCHEDULER_HOOKS: dict[str, Callable] = {_IDLE: _after_idle}


def follows_idle_gap(batch: ScheduleBatch) -> bool:
    """Whether the scheduler had nothing to do before this step. To be asked once a step."""
    global _idle
    was_idle, _idle = _idle, False
    return was_idle


def declare(args: ServerArgs, **fields: object) -> None:
    """Changes settings while they are resolved. What was declared before would replace a field that is only set."""
    for name, value in fields.items():
        setattr(args, name, value)
    args._resolved_overrides.append(("specstore", fields))


def resolve(args: ServerArgs) -> None:
    """Fills in the settings that were not given: that has been done."""


def model_config_of(args: ServerArgs) -> ModelConfig:
    """The configuration of the served model, while settings are resolved."""
    return args.get_model_config()


def attention_backends() -> tuple[str, str]:
    """The attention backends of prefill and decode in this process. The configuration must be published."""
    from sglang.srt.runtime_context import get_server_args

    return get_server_args().get_attention_backends()


def reserve_per_decode() -> tuple[int, int]:
    """Tokens that are reserved for a request at each decode step, and those of a page. The configuration must be published."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_server_args

    return get_alloc_reserve_per_decode(), get_server_args().page_size


def attention_is_data_parallel(view: ResolvedView) -> bool:
    """Whether ranks share the attention by requests."""
    return view.enable_dp_attention


def watermarked(info: SamplingBatchInfo) -> bool:
    """Whether the output of a request may carry a watermark."""
    return False


def widest_top_k(top_ks: Sequence[int]) -> dict[str, int | None]:
    """The field of `SamplingBatchInfo` that says which columns a top-k may keep, for rows with these."""
    return {}


def hybrid_kda_config(config: ModelConfig) -> object | None:
    """The configuration of a model with KDA layers, None for another model."""
    from sglang.srt.configs.hybrid_arch import kimi_linear_config

    return kimi_linear_config(config)


def as_draw(tokens: torch.Tensor) -> object:
    """Drawn tokens as `Sampler._sample_from_probs` returns them."""
    return tokens


def drawn(result: Any) -> torch.Tensor:
    """The tokens in such a result."""
    return result


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


def tree_walk() -> Callable:
    """The kernel that walks a verified tree."""
    from sglang.srt.speculative.eagle_utils import verify_tree_greedy_func

    return verify_tree_greedy_func


def aborted(sender: SenderWrapper, output: object, recv_obj: Req | None = None) -> Req | None:
    """The request that a call of `ABORT` ends; None for any other message."""
    from sglang.srt.managers.scheduler import AbortReq

    return recv_obj if isinstance(output, AbortReq) else None


def teller(field: str, summary_of: Callable[[Req], list]) -> Callable:
    """What to call after `STREAMER`, so that messages to the process that answers have a further field. summary_of: a request's
    entry, empty if there is none."""

    def after_accept(result: None, message: _GenerationStreamAccumulator, *, req: Req) -> None:
        if not message.rids or message.rids[-1] != req.rid:
            return  # it is not in this message
        entry, told = summary_of(req), message.customized_info
        if message.rust_server_mode:
            _say_that_nothing_is_told(field)
        elif entry or field in told:
            before = told.get(field) or [[]] * (len(message.rids) - 1)
            told[field] = [*before[: len(message.rids) - 1], entry]

    return after_accept


@functools.cache
def _say_that_nothing_is_told(field: str) -> None:
    logger.warning("specstore: SGLang's Rust server takes no further fields: meta_info has no `%s`", field)


def meta_info_hooks(field: str) -> dict[str, Callable]:
    """What to call around functions of the process that answers, so that an entry of the field can get into `meta_info`."""

    def around_message(original: Callable, manager: TokenizerManager, message: Any) -> object:
        # SGLang would take the field for a list with an entry a token.
        global _told
        from sglang.srt.managers.io_struct import unwrap_from_pickle, wrap_as_pickle

        fields = unwrap_from_pickle(getattr(message, "customized_info", None)) or {}
        _told = dict(zip(message.rids, fields.pop(field, ()), strict=False))
        if _told:
            message.customized_info = wrap_as_pickle(fields) if fields else None
        return original(manager, message)

    return {_MESSAGE: around_message}


def put_told(field: str, meta_info: dict[str, Any], message: Any, index: int) -> None:
    """Puts the field's entry into `meta_info`, at the last message of a request, as `meta_info_hooks` has kept it."""
    for entry in _told.get(message.rids[index], ()):
        meta_info[field] = entry


def place_kv(runner: ModelRunner, batch: ForwardBatch) -> None:
    """Tells the batch where its slots lie: they lie where they are."""


def relay(draft_input: NgramVerifyInput, future_map: FutureMap) -> None:
    """Hands accepted tokens to the next step under overlap scheduling: the draft input itself has them."""


def __getattr__(name: str) -> Any:
    """All else is as in 0.5.23."""
    return getattr(v0_5_23, name)
