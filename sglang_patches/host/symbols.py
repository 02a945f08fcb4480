"""Every SGLang symbol the plugin touches, with the signature it was written against.

SGLang does not promise these as an API. The table is checked at load; on a mismatch the plugin's algorithms refuse
to start and name the row. Rows that differ between versions are in `versions`. `python -m sglang_patches.check` prints it.
"""

from __future__ import annotations

import inspect
import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sglang_patches.host import versions
from sglang_patches.host.versions.rows import HostSymbol, row

logger = logging.getLogger(__name__)

_SRT = "sglang.srt."
_PROCESSOR = _SRT + "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."
_MANAGER = _SRT + "managers.tokenizer_manager.TokenizerManager."
_REPACK = "hooked on a CPU: packed weights are made again"
_REGISTRY = _SRT + "plugins.hook_registry."
_EVERYWHERE: tuple[HostSymbol, ...] = (
    # Start: hooks, flags, algorithms
    row(_REGISTRY + "HookRegistry.register", "target hook hook_type source", "every hook"),
    row(_REGISTRY + "HookRegistry.apply_hooks", "", "hooks on the scheduler"),
    row(_REGISTRY + "HookRegistry._patched", None, "whether a hook would be left out"),
    row(_REGISTRY + "HookRegistry._hooks", None, "which plugin's hook keeps ours out"),
    row(_REGISTRY + "HookType.BEFORE", None, "kind of a hook"),
    row(_REGISTRY + "HookType.AFTER", None, "kind of a hook"),
    row(_REGISTRY + "HookType.AROUND", None, "kind of a hook"),
    row(_SRT + "utils.is_cpu", "", "whether the CPU support is installed"),
    row(
        _SRT + "utils.get_available_gpu_memory",
        "device gpu_id distributed empty_cache cpu_group",
        "room for logits",
    ),
    row(_SRT + "utils.is_pin_memory_available", "device", "penalties go to the device without a wait"),
    row(_SRT + "server_args.ServerArgs.add_cli_args", "parser", "hooked: --specstore-* flags"),
    row(
        _SRT + "server_args.ServerArgs.from_cli_args", "args", "hooked: exports the flags to child processes"
    ),
    row(
        _SRT + "speculative.spec_info.SpeculativeAlgorithm.register",
        "name supports_overlap validate_server_args spec_class",
        "registers the algorithms",
    ),
    row(
        _SRT + "speculative.spec_registry.CustomSpecAlgo.__init__",
        "self name factory supports_overlap validate_server_args",
        "base of our algorithm object",
    ),
    row(
        _SRT + "speculative.spec_info.SpeculativeAlgorithm.handle_server_args",
        "self server_args",
        "hooked: retrieval beside a head",
    ),
    row(
        _SRT + "speculative.spec_info.SpeculativeAlgorithm.create_worker",
        "self server_args",
        "hooked: retrieval beside a head",
    ),
    row(
        _SRT + "speculative.spec_registry.CustomSpecAlgo.handle_server_args", "self server_args", "overridden"
    ),
    # The first step on a decode instance
    row(
        _SRT + "managers.overlap_utils.FutureMap.__init__",
        "self device spec_algo req_to_token_pool needs_cpu_seq_lens needs_confidence_relay",
        "created by our algorithm object, as the built-in ones do",
    ),
    row(
        _SRT + "managers.overlap_utils.FutureMap.publish",
        "self future_indices new_seq_lens confidence",
        "lengths of requests that another instance has prefilled",
    ),
    # Settings
    row(
        _SRT + "arg_groups.overrides.resolved_view",
        "server_args",
        "reads the configuration while it is resolved",
    ),
    row(_SRT + "runtime_context.get_spec", "", "resolved speculative configuration"),
    row(_SRT + "runtime_context.get_schedule", "", "overlap or not, page size"),
    row(_SRT + "runtime_context.get_parallel", "", "tensor-parallel group"),
    row(_SRT + "runtime_context.get_exec", "", "CUDA-graph configuration"),
    row(_SRT + "runtime_context.get_device", "", "where the tensors of a step are"),
    # The end of a request
    row(
        _SRT + "managers.schedule_batch.Req._check_token_based_finish",
        "self new_accepted_tokens",
        "the same tokens end what is drafted for a request",
    ),
    row(
        _SRT + "managers.schedule_batch.Req.update_finish_state",
        "self new_accepted_len",
        "hooked: the first end in an accepted run is the request's",
    ),
    row(_PROCESSOR + "_resolve_spec_v2_tokens", "self result batch", "as above"),
    row(_PROCESSOR + "advance_grammar_fsm", "self result batch", "where a grammar ends an accepted run"),
    row(
        _SRT + "managers.schedule_batch.Req.is_prefill_only",
        None,
        "replaced: requests that want nothing said, under speculation too",
    ),
    row(
        _SRT + "session.session_controller.SessionReqNode.clear",
        "self req_dict",
        "hooked: requests of an open session that have one rid",
    ),
    row(
        _SRT + "speculative.base_spec_worker.BaseSpecWorker.note_request_finished",
        "self rid natural_stop",
        "overridden: closes the session",
    ),
    row(
        _PROCESSOR + "process_batch_result_prefill",
        "self batch result",
        "hooked: closes the session of a request that ends at prefill",
    ),
    row(
        _PROCESSOR + "process_batch_result_prebuilt",
        "self batch",
        "hooked: closes the session of a request that ends as it joins a decode instance's batch",
    ),
    # What a request's answer says of its decoding
    row(_SRT + "managers.schedule_batch.Req.output_ids_through_stop", None, "the tokens of the answer"),
    row(
        _MANAGER + "_calculate_spec_decoding_metrics",
        "self meta_info recv_obj i",
        "hooked: drafted tokens are those that were verified",
    ),
    row(_SRT + "managers.io_struct.GenerateReqInput", None, "the tenant of a request"),
    row(
        _MANAGER + "_create_tokenized_object", None, "hooked: requests that would end the server, references"
    ),
    *(
        row(
            _SRT + "managers.tokenizer_control_mixin.TokenizerControlMixin." + name,
            "self obj request",
            "hooked: a session belongs to a tenant",
        )
        for name in ("open_session", "close_session")
    ),
    *(
        row(
            _SRT + "entrypoints.ollama.serving.OllamaServing." + name,
            "self gen_request raw_request model_name",
            "hooked: the last text of a stream",
        )
        for name in ("_stream_chat_response", "_stream_generate_response")
    ),
    row(
        _SRT + "entrypoints.openai.serving_chat.OpenAIServingChat.handle_request",
        "self request raw_request",
        "hooked: a chat completion's prediction, and what its usage says of it",
    ),
    row(_SRT + "environ.envs", None, "servers that are refused where requests have tenants"),
    row(_SRT + "environ.Envs.SGLANG_RUST_SERVER", None, "as above"),
    # A step: draft, forward, commit
    row(_SRT + "model_executor.forward_batch_info.ForwardMode.DECODE", None, "a step of plain decoding"),
    row(_SRT + "model_executor.forward_batch_info.ForwardMode.TARGET_VERIFY", None, "a step over a tree"),
    row(
        _SRT + "observability.req_time_stats.set_time_batch",
        "reqs set_func trace_only attrs",
        "a request's trace tells when its draft was made",
    ),
    row(
        _SRT + "speculative.base_spec_worker.BaseSpecWorker.on_verify_complete_cpu",
        "self num_correct_drafts_per_req batch_size",
        "called by the scheduler on every worker",
    ),
    row(
        _SRT + "speculative.ngram_info.NgramVerifyInput.__init__",
        "self draft_token custom_mask positions retrieve_index retrieve_next_token retrieve_next_sibling "
        "draft_token_num future_indices new_seq_lens accept_tokens accept_lens",
        "the verify input every attention backend and the CUDA-graph runner accept for trees",
    ),
    row(
        "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_func",
        "req_pool_indices req_to_token start_offset end_offset batch_size draft_token_num device",
        "KV slots of the tree's nodes",
    ),
    row(
        _SRT + "speculative.spec_utils.move_accept_tokens_to_target_kvcache",
        "batch accept_index num_correct_drafts token_to_kv_pool_allocator",
        "commits the accepted path's KV",
    ),
    row(
        _SRT + "speculative.spec_utils.build_grammar_vocab_mask",
        "reqs tree sampling_info device barrier",
        "constrained decoding over a tree",
    ),
    row(
        _SRT + "speculative.spec_utils.GrammarTree.from_host",
        "retrieve_next_token retrieve_next_sibling draft_token",
        "constrained decoding over a tree",
    ),
    row(_SRT + "speculative.spec_utils.prepare_mamba_track_for_verify", "batch", "hybrid models"),
    row(
        _SRT + "speculative.spec_utils.record_stream_for_v2_verify",
        "batch verify_input fwd_stream",
        "tensor lifetimes under overlap scheduling",
    ),
    row(
        _SRT + "managers.utils.GenerationBatchResult.__init__",
        None,
        "what a step returns to the scheduler",
    ),
    row(
        _SRT + "managers.tp_worker.TpModelWorker.forward_batch_generation",
        None,
        "the target's forward",
    ),
    row(
        _SRT + "managers.schedule_batch.ScheduleBatch.grammar_needs_sync",
        "self",
        "whether results lag by a step",
    ),
    # The target's own choice at a node
    row(
        _SRT + "sampling.sampling_batch_info.SamplingBatchInfo.apply_logits_bias",
        "self logits",
        "the target's own logit bias and grammar, at every node",
    ),
    row(
        _SRT + "constrained.base_grammar_backend.GrammarMask.__init__", None, "grammar masks of single nodes"
    ),
    row(
        _SRT + "layers.sampler.Sampler._sample_from_probs",
        "self probs sampling_info positions simple_sampling_case",
        "in its place tokens are drawn with the noise that drafts share",
    ),
    row(_SRT + "layers.logits_processor.LogitsProcessorOutput.__init__", None, "input of the sampler"),
    row(
        _SRT + "sampling.custom_logit_processor.CustomLogitProcessor.from_str",
        "json_str",
        "what the scheduler would load",
    ),
    row(_SRT + "sampling.sampling_params.SamplingParams.__init__", None, "custom_params of a request"),
    row(_SRT + "sampling.sampling_params.TOP_K_ALL", None, "top-k of a request that sets none"),
    row(_SRT + "layers.dp_attention.is_dp_attention_enabled", "", "which ranks must agree on the outcome"),
    # A CPU: settings, attention, layers
    row(
        _SRT + "layers.attention.attention_registry.register_attention_backend",
        "name",
        "the CPU attention backend",
    ),
    row(
        _SRT + "layers.attention.base_attn_backend.AttentionBackend.__init__",
        None,
        "base class of our attention backend",
    ),
    row(_SRT + "layers.radix_attention.AttentionType.DECODER", None, "the one kind of attention it serves"),
    row(_SRT + "mem_cache.swa_memory_pool.SWAKVPool", None, "whether a sliding window has its own slots"),
    *(
        row(
            _SRT + "speculative.draft_utils.DraftBackendFactory." + name,
            "self",
            "hooked on a CPU: attention of a head that drafts",
        )
        for name in ("create_decode_backend", "create_draft_extend_backend")
    ),
    row(
        _SRT + "disaggregation.utils.get_kv_class",
        "transfer_backend class_type",
        "hooked on a CPU: KV leaves without a CUDA event",
    ),
    row(
        _SRT + "environ.Envs.SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX",
        None,
        "off on a CPU: it waits with a CUDA event",
    ),
    row(
        _SRT + "disaggregation.utils.FAKE_BOOTSTRAP_HOST",
        None,
        "tells an instance's own warm-up requests from a router's",
    ),
    *(
        row(
            _SRT + "model_executor.model_runner_components.weight_updater.WeightUpdater." + name,
            None,
            _REPACK,
        )
        for name in (
            "update_weights_from_disk",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
        )
    ),
    row(
        _SRT + "layers.rotary_embedding.base.RotaryEmbedding.forward_native",
        "self positions query key offsets fused_set_kv_buffer_arg",
        "hooked on a CPU: fast path for few rows",
    ),
    row(
        _SRT + "layers.quantization.unquant.UnquantizedLinearMethod.apply",
        "self layer x bias",
        "hooked on a CPU: fast path for few rows",
    ),
    row(
        _SRT + "layers.logits_processor.should_apply_lm_head_quant_method",
        "lm_head quant_method",
        "whether the fast path takes the head",
    ),
    row(
        _SRT + "layers.vocab_parallel_embedding.get_masked_input_and_mask",
        None,
        "hooked on a CPU: tensor-parallel ranks without a C++ compiler",
    ),
    row(
        _SRT + "speculative.spec_utils._select_top_k_tokens_later",
        None,
        "hooked on a CPU: heads without a C++ compiler",
    ),
    row(
        _SRT + "distributed.parallel_state.init_model_parallel_group",
        None,
        "hooked on a CPU: tensor-parallel ranks without NCCL",
    ),
    row(
        _SRT + "mem_cache.allocation.get_last_loc",
        "req_to_token req_pool_indices_tensor prefix_lens_tensor",
        "hooked on a CPU: page sizes above 1 without Triton",
    ),
    row(
        _SRT + "mem_cache.allocation.get_last_loc_torch",
        "req_to_token req_pool_indices_tensor prefix_lens_tensor",
        "as above",
    ),
    # Which attention backend verifies
    row(_SRT + "configs.model_config.AttentionArch", None, "what kind of attention a model has"),
    *(
        row(_SRT + "configs.hybrid_arch." + name, "model_config", "which linear-attention layers a model has")
        for name in ("hybrid_gdn_config", "mamba2_config", "mambaish_config")
    ),
    # The probe of tree attention
    row(_SRT + "layers.radix_attention.RadixAttention", None, "the layers that are probed"),
    row(_SRT + "model_executor.forward_batch_info.ForwardBatch", None, "a verification step for the probe"),
    row(_SRT + "model_executor.forward_context.ForwardContext", None, "which backend serves them"),
    # Graphs of several widths
    row(_SRT + "model_executor.cuda_graph_config.Backend", None, "whether decode steps replay graphs"),
    row(_SRT + "model_executor.cuda_graph_config.Phase", None, "as above"),
    row(_SRT + "model_executor.cuda_graph_config.check_cuda_graph_backend", "phase backend", "as above"),
    row(
        _SRT + "model_executor.cuda_graph_config.CudaGraphConfig", None, "batch sizes to capture for a width"
    ),
    row(_SRT + "runtime_context.get_context", "", "the width while its graphs are captured"),
    row(
        _SRT + "model_executor.model_runner.ModelRunner._get_attention_backend",
        "self init_new_workspace",
        "an attention backend for a width",
    ),
    row(
        _SRT + "model_executor.model_runner.ModelRunner._decode_cuda_graph_runner_cls",
        "self",
        "its graphs",
    ),
    row(
        _SRT + "utils.common.get_available_gpu_memory",
        "device gpu_id distributed empty_cache cpu_group",
        "memory that a width takes",
    ),
    # python -m sglang_patches.check
    row(_SRT + "server_args.prepare_server_args", "argv", "an engine with the flags given to the check"),
    row(
        _SRT + "entrypoints.engine.Engine.run_scheduler_process_func",
        None,
        "an engine with the noise of the check",
    ),
    row(_SRT + "managers.scheduler.run_scheduler_process", None, "as above"),
    # The draft process
    row(_SRT + "plugins.load_plugins", "", "the CPU support in the draft process"),
    row(_SRT + "model_executor.forward_batch_info.CaptureHiddenMode", None, "a draft forward"),
    row(_SRT + "configs.model_config.ModelConfig", None, "the draft model"),
    row(_SRT + "configs.hybrid_arch.mambaish_config", "model_config", "as above"),
    row(_SRT + "model_executor.model_runner.ModelRunner.alloc_memory_pool", None, "the draft model"),
    # The cost of a further row
    row(_SRT + "layers.linear.LinearBase.__init__", None, "timed at start: the cost of a further row"),
    row(_SRT + "layers.linear.RowParallelLinear.__init__", None, "as above"),
)


def symbols_of(tested: str) -> tuple[HostSymbol, ...]:
    """The table of a tested version."""
    return _EVERYWHERE + versions.module_of(tested).ROWS


HOST_SYMBOLS = _EVERYWHERE + versions.host.ROWS


class _ModuleImportError(Exception):
    """A module that exists and cannot be imported."""


def _resolve(path: str) -> Any:
    """The object that the path names. Raises AttributeError if there is none."""
    name, *rest = path.split(".")
    found: object = _import(name)
    for part in rest:
        name += "." + part
        is_module = hasattr(found, "__path__") and find_spec(name) is not None
        found = _import(name) if is_module else getattr(found, part)
    return found


def _import(module: str) -> object:
    try:
        return import_module(module)
    except Exception as error:  # whatever its code raises
        raise _ModuleImportError(f"{module} cannot be imported: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """SGLang's kernel package lists what it tried; the lines that start with a dash say what went wrong, one per attempt."""
    tries = [line[2:] for line in str(error).splitlines() if line.startswith("- ") and "Error: " in line]
    return "; ".join(tries) or f"{type(error).__name__}: {error}"


def _drift(symbol: HostSymbol) -> str | None:
    try:
        found = _resolve(symbol.path)
    except AttributeError as error:
        return f"missing ({error})"
    except _ModuleImportError as error:
        return str(error)
    if symbol.parameters is None:
        return None
    parameters = tuple(p for p in inspect.signature(inspect.unwrap(found)).parameters if p != "cls")
    if parameters != symbol.parameters:
        return f"signature is ({', '.join(parameters)}), expected ({', '.join(symbol.parameters)})"
    return None


def check_host(symbols: tuple[HostSymbol, ...] = HOST_SYMBOLS) -> list[tuple[HostSymbol, str | None]]:
    """Each row, with its difference in the installed SGLang or None."""
    return [(symbol, _drift(symbol)) for symbol in symbols]


def drift_message(symbols: tuple[HostSymbol, ...] = HOST_SYMBOLS) -> str | None:
    """One line for the first drifted row, None if the host is as expected."""
    for symbol, drift in check_host(symbols):
        if drift is not None:
            return (
                f"specstore: SGLang {versions.INSTALLED} differs from {versions.nearest(versions.INSTALLED)} "
                f"(tested: {', '.join(versions.TESTED)}): {symbol.path}: {drift} (used for: {symbol.why})"
            )
    return None


def refuse_drift() -> None:
    """Raises RuntimeError that names the first drifted row. Logs a version that was not tested and has none."""
    if drift := drift_message():
        raise RuntimeError(drift)
    if versions.INSTALLED not in versions.TESTED:
        logger.warning(
            "specstore: SGLang %s was not tested (%s were); all that the plugin touches is as in %s",
            versions.INSTALLED,
            ", ".join(versions.TESTED),
            versions.nearest(versions.INSTALLED),
        )
