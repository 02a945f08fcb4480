"""`make settings`: writes settings.md, which says what becomes of each setting and each request field of SGLang beside speculation.

Every field of SGLang's `ServerArgs` stands in one row of SETTINGS, every field of its requests in one row of REQUESTS. A test
(tests/unit/plugin/test_settings.py) compares them with the SGLang that is installed, tries each refusal, and compares the page.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from sglang_patches.draft_process import arguments


class Verdict(StrEnum):
    RIGHT = "right"
    REFUSED = "refused"
    BY_SGLANG = "refused by SGLang"
    UNTESTED = "untested"
    NO_PART = "no part in decoding"


@dataclass(frozen=True)
class Row:
    """about: a reason, or what was seen; of untested fields and those without a part in decoding, what they concern.

    tests: files that mention each of the fields. given: the refused fields with a value that is refused, `beside` these others.
    says: what the refusal names, if not the flag. shows: whether another value may be accepted.
    """

    verdict: Verdict
    names: tuple[str, ...]
    about: str
    tests: tuple[str, ...] = ()
    given: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, Any] = field(default_factory=dict)
    says: str = ""
    shows: bool = False


def right(names: str, about: str, *tests: str) -> Row:
    return Row(Verdict.RIGHT, tuple(names.split()), about, tests=tuple(f"tests/{test}.py" for test in tests))


def refused(about: str, /, beside: dict[str, Any] | None = None, **given: Any) -> Row:
    return Row(Verdict.REFUSED, tuple(given), about, given=given, beside=beside or {}, shows=True)


def without_effect(about: str, /, **given: Any) -> Row:
    return Row(Verdict.REFUSED, tuple(given), about, given=given)


def by_sglang(about: str, /, says: str = "", beside: dict[str, Any] | None = None, **given: Any) -> Row:
    return Row(Verdict.BY_SGLANG, tuple(given), about, given=given, beside=beside or {}, says=says)


def untested(about: str, names: str) -> Row:
    return Row(Verdict.UNTESTED, tuple(names.split()), about)


def no_part(about: str, names: str) -> Row:
    return Row(Verdict.NO_PART, tuple(names.split()), about)


WITHOUT_FLAG = no_part(
    "without a flag: for programs, or set by SGLang itself",
    "custom_sigquit_handler grpc_worker_threads stat_loggers _speculative_draft_quantization_explicitly_set "
    "_radix_eviction_policy_explicitly_set _swa_full_tokens_ratio_explicitly_set uses_mamba_radix_cache enable_cp_tp_group_sharing "
    "speculative_boundary_reduction watermark_key watermark_key_b watermark_context_window watermark_mixing_probability "
    "watermark_max_probability watermark_default_enabled watermark_enforce_all aux_hidden_state_capture",
)
SETTINGS = (
    # What an operator is likely to set
    right(
        "speculative_algorithm speculative_draft_model_path",
        "the method, and the model that it drafts with; a method that drafts with none refuses one",
        "unit/plugin/test_draft_settings",
    ),
    right(
        "disable_overlap_schedule page_size chunked_prefill_size context_length max_running_requests max_total_tokens "
        "schedule_conservativeness constrained_json_disable_any_whitespace dtype device sampling_backend",
        "the servers of the conformance suite have them, and some retract requests: on a CPU, in float32",
        "conformance/conftest",
    ),
    right(
        "tp_size",
        "all ranks commit the same tokens; more than one kind of GPU is untested",
        "e2e/test_tensor_parallel",
    ),
    right(
        "dp_size load_balance_method", "replicas of a server, each with a draft process", "e2e/test_replicas"
    ),
    right(
        "disaggregation_mode num_reserved_decode_tokens",
        "both halves, on a CPU over TCP",
        "conformance/test_split",
    ),
    right(
        "disable_radix_cache schedule_policy prefill_max_requests max_prefill_tokens prefill_decode_interval scheduler_recv_interval "
        "enable_priority_scheduling priority_scheduling_preemption_threshold default_priority_value retraction_policy "
        "radix_eviction_policy",
        "requests of a higher priority put others aside",
        "e2e/test_settings",
        "e2e/test_request_cases",
    ),
    right("skip_tokenizer_init stream_interval incremental_streaming_output", "", "e2e/test_settings"),
    right("reasoning_parser", "", "e2e/test_settings"),
    right(
        "enable_return_hidden_states enable_custom_logit_processor",
        "what requests ask for then is in the second table",
        "conformance/conftest",
    ),
    refused(
        "verification over a tree asks a grammar for packed bits and for a rollback, and `outlines` has neither; `xgrammar`, the default, "
        "is right, also with penalties and stops, and so are regular expressions with `llguidance`, whose JSON was not compared",
        grammar_backend="outlines",
    ),
    refused(
        "a backend that ignores the mask of a tree verifies wrong tokens; [compatibility](compatibility.md#attention-backends) says which verify, and what "
        "replaces a default that does not; `fa3` needs `--page-size 1`",
        beside={"page_size": 16},
        attention_backend="fa3",
        prefill_attention_backend="fa3",
    ),
    refused(
        "as above",
        beside={"page_size": 16, "speculative_attention_mode": "decode"},
        decode_attention_backend="fa3",
    ),
    refused(
        "a batch is either of prompts or of decode steps: it would have no effect", enable_mixed_chunk=True
    ),
    refused(
        "a turn's last token counts as cached, whose KV no verification has written",
        enable_streaming_session=True,
    ),
    refused(
        "SGLang loads no plugins in these processes, so the start would never end", tokenizer_worker_num=2
    ),
    refused("SGLang loads no plugins in Ray's actors", use_ray=True),
    refused(
        "one step is over all layers, all of a prompt's ranks and one batch",
        pp_size=2,
        enable_two_batch_overlap=True,
    ),
    refused("as above", beside={"tp_size": 2}, dcp_size=2, attn_cp_size=2, attn_dp_size=2),
    refused(
        "as above; replicas by `--dp-size` alone are right",
        beside={"tp_size": 2, "dp_size": 2},
        enable_dp_attention=True,
    ),
    refused("it prefills around the worker", enable_pdmux=True),
    refused("an instance's worker is made for one of the two halves", enable_pd_role_switch=True),
    refused(
        "a verified tree has a row a node, the answer's buffer a row a token",
        enable_return_routed_experts=True,
        enable_return_indexer_topk=True,
    ),
    refused("a watermark's state follows one token after the other", enable_watermark=True),
    # Speculation by other methods
    without_effect(
        "the tree's shape follows from `--specstore-nodes`; a number of draft tokens that agrees is accepted",
        speculative_num_draft_tokens=3,
        speculative_num_steps=3,
        speculative_eagle_topk=4,
    ),
    without_effect(
        "a draft is accepted where the target draws it, and in no other case",
        speculative_accept_threshold_single=0.5,
        speculative_accept_threshold_acc=0.5,
        speculative_use_rejection_sampling=True,
    ),
    without_effect(
        "without a draft model; [with one](#the-draft-model) its process has them",
        speculative_draft_model_revision="v2",
        speculative_draft_load_format="dummy",
        speculative_draft_model_quantization="fp8",
        speculative_draft_kv_cache_dtype="fp8_e4m3",
        speculative_draft_attention_backend="triton",
        speculative_moe_runner_backend="triton",
        decrypted_draft_config_file="config.json",
    ),
    without_effect(
        "they are of draft models in SGLang's own process, of EAGLE's heads, or of models that are [no draft models here]"
        "(draft-model.md#when-it-does-not-come-up)",
        speculative_draft_window_size=64,
        speculative_token_map="tokens.pt",
        speculative_dsa_topk_backend="torch",
        speculative_moe_a2a_backend="deepep",
        speculative_enable_w4a4_mxfp4_megamoe=True,
        enable_draft_weights_cpu_backup=True,
    ),
    by_sglang("it needs a setting that is refused", speculative_draft_sink_size=4),
    without_effect(
        "they are of SGLang's other methods",
        speculative_adaptive=True,
        speculative_adaptive_config="adaptive.json",
        speculative_ngram_min_bfs_breadth=2,
        speculative_ngram_max_bfs_breadth=4,
        speculative_ngram_match_type="PROB",
        speculative_ngram_max_trie_depth=9,
        speculative_ngram_capacity=1000,
        speculative_ngram_external_corpus_path="corpus.jsonl",
        speculative_ngram_external_sam_budget=4,
        speculative_ngram_external_corpus_max_tokens=1000,
        speculative_dflash_block_size=8,
        speculative_domino_candidate_pool_size=64,
        speculative_dspark_block_size=8,
        speculative_dspark_sps_table_path="table.json",
        speculative_dspark_confidence_sts_path="sts.json",
        speculative_dspark_align_verify_tokens_to_graph_tier=True,
        enable_multi_layer_eagle=True,
        uno_lora_path="lora",
        decoupled_spec_role="verifier",
        decoupled_spec_bind_endpoint="tcp://127.0.0.1:1",
        decoupled_spec_connect_endpoints=["tcp://127.0.0.1:2"],
        decoupled_spec_rank=1,
        spec_trace_dir="traces",
    ),
    by_sglang("for EAGLE and DFLASH alone", speculative_use_block_verification=True),
    # With any speculation, or with any but SGLang's own
    by_sglang(
        "with any speculation but its own",
        says="LoRA is only compatible with",
        enable_lora=True,
        lora_paths=["a=b"],
    ),
    by_sglang("as above", enable_unified_memory=True),
    by_sglang("with any speculation", says="LMCache", enable_lmcache=True),
    by_sglang("as above", weight_cache_mode="client"),
    by_sglang(
        "it captures what draft models of SGLang's own methods read", enable_return_aux_hidden_states=True
    ),
    by_sglang(
        "with any speculation",
        says="does not support speculative decoding",
        beside={"tp_size": 2},
        dwdp_size=2,
    ),
    by_sglang(
        "with any but EAGLE and DSPARK",
        beside={"disaggregation_mode": "decode"},
        disaggregation_decode_enable_radix_cache=True,
    ),
    # Accepted, and not compared
    untested("which of two attention backends verifies; that one is checked", "speculative_attention_mode"),
    untested(
        "order of requests, and when prefill gives way to decoding",
        "disable_priority_preemption "
        "abort_on_priority_when_disabled schedule_low_priority_values_first "
        "prefill_decode_interval_min_bs  "
        "min_free_slots_delay enable_prefill_delayer prefill_delayer_max_delay_passes "
        "prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets "
        "prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms",
    ),
    untested(
        "cached prompts, and caches behind the GPU's",
        "radix_eviction_policy_config radix_cache_backend enable_session_radix_cache "
        "strip_thinking_cache disable_chunked_prefix_cache enable_page_major_kv_layout swa_full_tokens_ratio swa_prefix_tails "
        "disable_hybrid_swa_memory enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size "
        "hicache_host_memory_fraction hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_backend "
        "hicache_storage_prefetch_policy hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval "
        "hicache_storage_prefetch_retry_max_attempts enable_unified_cache_external_linker unified_cache_external_linker_backend "
        "unified_cache_external_linker_config enable_linker_mla_dedup enable_hisparse hisparse_config lmcache_config_file "
        "enable_flexkv flexkv_config_file enable_kv_cache_sharding",
    ),
    untested(
        "what a grammar allows; SGLang has no kernels for strict thinking on a CPU",
        "enable_strict_thinking constrained_json_whitespace_pattern constrained_json_max_whitespace_cnt disable_outlines_disk_cache",
    ),
    untested(
        "what a request may ask for",
        "return_hidden_states_mode return_aux_hidden_state_layer_ids "
        "allow_auto_truncate sampling_mask_max_tokens enable_mis is_embedding prefill_only_disable_kv_cache",
    ),
    untested(
        "seeds of sampling; the first is no promise that a server repeats its sampled answers: how many numbers a step draws "
        "depends on what was drafted",
        "random_seed enable_deterministic_inference rl_on_policy_target",
    ),
    untested(
        "numbers: quantised weights and KV, precision of single layers; answers change with any speculation as with a batch",
        "quantization quantization_param_path kv_cache_dtype qsa_indexer_dtype prefill_kv_cache_dequant_dtype modelopt_quant "
        "quantize_and_serve rl_quant_profile enable_fp32_lm_head enable_tf32_matmul triton_attention_reduce_in_fp32 "
        "enable_quant_communications",
    ),
    untested(
        "models: another implementation, another configuration",
        "model_impl model_config_parser json_model_override_args",
    ),
    untested(
        "kernels",
        "enable_lean_attention enable_nvidia_megakernel enable_amd_monokernel fp8_gemm_runner_backend fp4_gemm_runner_backend "
        "bf16_gemm_backend dsa_prefill_backend dsv4_prefill_backend dsa_triton_union dsa_decode_backend dsv4_attn_backend "
        "dsa_paged_mqa_logits_backend dsa_topk_backend disable_flashinfer_autotune flashinfer_autotune_skip_ops "
        "triton_attention_num_kv_splits triton_attention_split_tile_size flashinfer_mla_disable_ragged enable_fused_qk_norm_rope "
        "enable_deepseek_v4_fp4_indexer enable_dsa_fused_indexer enable_scattered_sconv mlx_enable_sampling",
    ),
    untested(
        "CUDA graphs and compilation",
        "cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs_decode cuda_graph_max_bs_prefill "
        "cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context "
        "disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding enable_profile_cuda_graph "
        "enable_cudagraph_gc debug_cuda_graph enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs",
    ),
    untested(
        "communication between ranks, and several hosts",
        "nnodes enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem boundary_reduction "
        "enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend "
        "enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode "
        "enable_attn_tp_input_scattered enable_layernorm_sp enable_megamoe_for_layernorm_sp disable_attn_tp_gather "
        "enable_single_batch_overlap base_gpu_id gpu_id_step",
    ),
    untested(
        "mixtures of experts",
        "moe_dp_size ep_size moe_a2a_backend moe_runner_backend enable_fused_moe_sum_all_reduce enable_w4a4_mxfp4_megamoe "
        "deepep_v2_mode deepep_mode deepep_config deepep_dispatcher_output_dtype fuseep_mode flashinfer_mxfp4_moe_precision "
        "flashinfer_a2a_dispatch_type ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm "
        "eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold "
        "expert_distribution_recorder_mode expert_distribution_recorder_buffer_size expert_balancedness_report_mode moe_dense_tp_size "
        "elastic_ep_backend enable_elastic_expert_backup mooncake_ib_device enable_waterfill ep_join_mode ep_join_rank_offset "
        "elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout disable_flashinfer_cutlass_moe_fp4_allgather "
        "disable_shared_experts_fusion enforce_shared_experts_fusion enable_shared_experts_attn_tp shared_experts_tp_size "
        "enable_paged_experts paged_experts_num_resident kt_weight_path kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts "
        "kt_max_deferred_experts_per_token",
    ),
    untested(
        "recurrent and hybrid models",
        "max_mamba_cache_size mamba_full_memory_ratio mamba_backend mamba_ssm_dtype mamba_max_states_per_path "
        "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds mamba_radix_cache_strategy mamba_track_interval "
        "enable_int8_mamba_checkpoint int8_mamba_ckpt_size linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend "
        "linear_attn_verify_backend enable_linear_replayssm linear_replayssm_cache_len enable_linear_replayssm_spec",
    ),
    untested(
        "models that see and hear, and encoders of their own",
        "enable_multimodal mm_attention_backend enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_enable_dp_encoder "
        "mm_process_config mm_preprocess_cache_size_mb trust_mm_content_hashes limit_mm_data_per_request enable_mm_global_cache "
        "mm_global_cache_backend image_processor_backend disable_fast_image_processor mm_feature_transport "
        "enable_precise_embedding_interpolation encoder_only language_only language_model_only encoder_transfer_backend encoder_urls "
        "encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder enable_encoder_swa_bounded_replay "
        "enable_decoder_swa_bounded_replay",
    ),
    untested("diffusion models", "dllm_algorithm dllm_algorithm_config dllm_fdfo"),
    untested(
        "prefill and decode on separate instances",
        "disaggregation_transfer_backend disaggregation_decode_allocation_policy disaggregation_enable_kv_checksum "
        "disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup disaggregation_decode_extra_slots "
        "disaggregation_decode_polling_interval disaggregation_decode_host_receive_threshold optimistic_prefill_attempts",
    ),
    untested(
        "weights outside the GPU, or taken from it for a while",
        "cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_mode ple_offload_embedding "
        "ple_offload_backend ple_offload_dir enable_memory_saver enable_weights_cpu_backup",
    ),
    untested(
        "servers that answer without SGLang's HTTP process; refused beside `--specstore-request-tenant`",
        "smg_grpc_mode grpc_mode grpc_port sidecar sidecar_args",
    ),
    untested(
        "looks into the forward",
        "forward_hooks kv_canary kv_canary_real_data kv_canary_sweep_interval debug_tensor_dump_output_folder debug_tensor_dump_layers "
        "debug_tensor_dump_input_file msprobe_dump_config enable_layerwise_nvtx_marker",
    ),
    # No part in decoding
    no_part(
        "where the model's files are, how they are loaded, and what is served under which name",
        "model_path tokenizer_path tokenizer_mode tokenizer_backend served_model_name weight_version revision download_dir load_format "
        "model_loader_extra_config trust_remote_code startup_weight_load_mode custom_weight_loader weight_loader_disable_mmap "
        "weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load "
        "remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port "
        "remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend "
        "remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port modelexpress_config model_checksum "
        "delete_ckpt_after_loading decrypted_config_file checkpoint_engine_wait_weights_before_ready "
        "modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path",
    ),
    no_part(
        "memory, processes and their watching",
        "mem_fraction_static watchdog_timeout soft_watchdog_timeout sleep_on_idle numa_node gc_threshold "
        "gc_warning_threshold_secs nccl_port dist_timeout dist_init_addr node_rank gated_launch_port enable_p2p_check pre_warm_nccl "
        "skip_server_warmup warmups num_continuous_decode_steps max_queued_requests disaggregation_bootstrap_port "
        "disaggregation_ib_device",
    ),
    no_part(
        "HTTP, TLS, keys and files",
        "host port fastapi_root_path enable_http_worker_reuseport grpc_response_timeout_secs enable_http2 "
        "http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password "
        "enable_ssl_refresh api_key admin_api_key file_storage_path smg_http_sidecar_port allowed_media_domains "
        "media_url_max_file_size_mb mm_processor_worker_num mm_io_worker_num asr_max_buffer_seconds asr_max_concurrent_sessions",
    ),
    no_part(
        "what is made of a request before it is scheduled, and of its tokens after they are chosen",
        "chat_template trust_request_chat_template hf_chat_template_name completion_template default_chat_template_kwargs "
        "tool_call_parser tool_server sampling_defaults preferred_sampling_params detokenizer_worker_num batch_notify_size "
        "stream_response_default_include_usage enable_cache_report return_input_ids return_output_ids enable_response_store "
        "enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout "
        "enable_tokenizer_batch_encode disable_tokenizer_batch_decode",
    ),
    no_part(
        "logs, metrics and traces",
        "log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target "
        "uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics enable_mfu_metrics "
        "enable_metrics_for_all_schedulers load_snapshot_publish_interval tokenizer_metrics_custom_labels_header "
        "tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency "
        "bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets decode_log_interval "
        "enable_request_time_stats_logging kv_events_config load_publish_endpoint enable_forward_pass_metrics "
        "forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint "
        "otlp_service_name export_metrics_to_file export_metrics_to_file_dir",
    ),
    no_part(
        "heeded only beside a setting that is refused",
        "pp_max_micro_batch_size pp_async_batch_depth enable_dynamic_chunking dcp_comm_backend dcp_replicate_q_proj enable_prefill_cp "
        "cp_strategy enable_dsa_cache_layer_split enable_cp_decode_attn_tp enable_dp_attention_local_control_broadcast "
        "enable_dp_lm_head enable_tp_lm_head_all_to_all enable_dense_mlp_attn_tp tbo_token_distribution_threshold pdmux_config_path "
        "sm_group_num enable_lora_overlap_loading max_lora_rank lora_target_modules max_loaded_loras max_loras_per_batch "
        "lora_eviction_policy lora_backend max_lora_chunk_size experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading "
        "lora_drain_wait_threshold weight_cache_socket weight_cache_timeout watermark_config",
    ),
    no_part("of one kind of processor, on which specstore does not run", "c128_page_size"),
    WITHOUT_FLAG,
)

# What becomes of a setting for the draft model, beside what its process is told (sglang_patches/draft_process/arguments.py). Those of
# SGLang's groups of settings `model`, `device` and `exec` stand one by one, the others by their group.
SETTLED = (
    "device base_gpu_id page_size max_total_tokens max_running_requests chunked_prefill_size disable_radix_cache "
    "disable_overlap_schedule skip_tokenizer_init context_length"
)
TARGET_ALONE = {
    "the target's files": "model_path revision quantization_param_path model_checksum delete_ckpt_after_loading decrypted_config_file "
    "modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path",
    "where the target's weights come from, if not from files; with `--load-format remote_instance` the draft model needs "
    "`--speculative-draft-load-format`": "remote_instance_weight_loader_seed_instance_ip "
    "remote_instance_weight_loader_seed_instance_service_port remote_instance_weight_loader_send_weights_group_ports "
    "remote_instance_weight_loader_backend remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port "
    "modelexpress_config",
    "ModelOpt's quantisation of the target as it is loaded, and how prefills read its packed KV": "quantize_and_serve modelopt_quant "
    "prefill_kv_cache_dequant_dtype",
    "weights that change while they are served, wait for that, or leave the device: the draft model's stay": "custom_weight_loader "
    "checkpoint_engine_wait_weights_before_ready startup_weight_load_mode rl_quant_profile weight_cache_mode weight_cache_socket "
    "weight_cache_timeout enable_memory_saver enable_weights_cpu_backup",
    "weights outside the device: a draft model is small, and has to be fast": "cpu_offload_gb offload_group_size offload_num_in_group "
    "offload_prefetch_step offload_mode ple_offload_embedding ple_offload_backend ple_offload_dir",
    "sizes of the target's batches; the draft model's graphs have its own, and follow the switches above": "cuda_graph_config "
    "cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_bs_decode cuda_graph_bs_prefill "
    "cuda_graph_prefill_max_context torch_compile_max_bs",
    "models that are no draft models here: latent or sparse attention, recurrent states, diffusion": "qsa_indexer_dtype "
    "dsa_prefill_backend dsv4_prefill_backend dsa_triton_union dsa_decode_backend dsv4_attn_backend dsa_paged_mqa_logits_backend "
    "dsa_topk_backend flashinfer_mla_disable_ragged enable_deepseek_v4_fp4_indexer enable_dsa_fused_indexer mamba_backend "
    "mamba_ssm_dtype mamba_max_states_per_path enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds "
    "mamba_radix_cache_strategy uses_mamba_radix_cache mamba_track_interval enable_int8_mamba_checkpoint int8_mamba_ckpt_size "
    "linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend enable_linear_replayssm "
    "linear_replayssm_cache_len enable_linear_replayssm_spec dllm_algorithm dllm_algorithm_config dllm_fdfo",
    "kernels for a few large models by name": "enable_nvidia_megakernel enable_amd_monokernel enable_scattered_sconv",
    "experts on several devices, or outside of them: the draft model is on one": "enable_fused_moe_sum_all_reduce moe_a2a_backend "
    "enable_w4a4_mxfp4_megamoe deepep_v2_mode deepep_mode fuseep_mode deepep_dispatcher_output_dtype flashinfer_a2a_dispatch_type "
    "ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations "
    "eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode "
    "expert_distribution_recorder_buffer_size expert_balancedness_report_mode deepep_config elastic_ep_backend "
    "enable_elastic_expert_backup mooncake_ib_device enable_waterfill ep_join_mode elastic_ep_scale_timeout "
    "disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion enforce_shared_experts_fusion enable_paged_experts "
    "paged_experts_num_resident kt_weight_path kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts "
    "kt_max_deferred_experts_per_token",
    "communication between ranks: it has one": "enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp "
    "enable_torch_symm_mem pre_warm_nccl boundary_reduction enable_quant_communications enable_flashinfer_allreduce_fusion "
    "enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion "
    "disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode enable_two_batch_overlap "
    "enable_single_batch_overlap tbo_token_distribution_threshold",
    "what a request may ask of its answer": "is_embedding enable_custom_logit_processor enable_watermark watermark_config watermark_key "
    "watermark_key_b watermark_context_window watermark_mixing_probability watermark_max_probability watermark_default_enabled "
    "watermark_enforce_all enable_return_hidden_states return_hidden_states_mode enable_return_aux_hidden_states "
    "aux_hidden_state_capture return_aux_hidden_state_layer_ids enable_return_routed_experts enable_return_indexer_topk "
    "sampling_mask_max_tokens grammar_backend disable_outlines_disk_cache enable_mis",
    "the same answers from every batch: they do not depend on what is drafted": "enable_deterministic_inference rl_on_policy_target "
    "random_seed mlx_enable_sampling",
    "encoders of images and sounds: it reads tokens": "enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay "
    "enable_precise_embedding_interpolation",
    "looks into the target's forward": "enable_layerwise_nvtx_marker",
    "the server's processes; where the draft process runs follows from `--specstore-draft-device`": "gpu_id_step watchdog_timeout "
    "soft_watchdog_timeout sleep_on_idle use_ray custom_sigquit_handler numa_node gc_threshold",
}
TARGET_GROUPS = {
    "spec": "the tree that is verified, or refused",
    "serving": "requests and answers: the draft process has none",
    "schedule": "the scheduler and the target's memory: the draft process has none of the first, and `--specstore-draft-tokens` of KV",
    "memory": "caches of prompts",
    "parallel": "ranks and hosts: the draft model is on one device",
    "observability": "logs, metrics and traces: the draft process has its own log, and its metrics are with the server's",
    "disagg": "prefill and decode on separate instances",
    "mm": "images and sounds: the draft model reads tokens",
    "lora": "refused",
}

# A name that several kinds of requests have stands once.
REQUESTS = (
    right(
        "max_new_tokens max_tokens max_completion_tokens max_output_tokens min_new_tokens min_tokens stop stop_token_ids stop_regex "
        "ignore_eos no_stop_trim",
        "several conditions may hold in one accepted run: the first in the text ends the answer",
        "conformance/request_cases/stops",
        "conformance/test_requests",
    ),
    right(
        "frequency_penalty presence_penalty repetition_penalty logit_bias",
        "equal to plain decoding without overlap scheduling; with it, SGLang's own penalties lag a token behind. Without it, SGLang applies a "
        "repetition penalty before or after the others as a set of Python happens to be ordered in its process, so the answer to a request "
        "with both may be another one after a restart. Here it is applied after them, as by SGLang with overlap scheduling",
        "conformance/test_features",
    ),
    right(
        "temperature top_p top_k min_p sampling_seed seed",
        "sampled answers have plain decoding's distribution; seeds are heeded under `--enable-deterministic-inference` alone, as without "
        "speculation",
        "conformance/test_in_process",
    ),
    right(
        "return_logprob logprob_start_len top_logprobs_num token_ids_logprob logprobs top_logprobs echo include return_text_in_logprobs "
        "return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs",
        "within 0.002. With `max_new_tokens: 0` nothing is told of a token that nobody asked for, unless the prefill shares a batch with a "
        "request that wants an answer: SGLang then tells one, without speculation too",
        "conformance/test_requests",
    ),
    refused(
        "scores at places of a prompt need `--disable-radix-cache` and `--chunked-prefill-size -1`, and are right there "
        "(`tests/e2e/test_settings.py`)",
        token_indices_to_pool=[3],
    ),
    right("return_hidden_states", "within 0.03", "conformance/test_requests"),
    right(
        "n best_of stream stream_interval rid", "", "conformance/test_requests", "conformance/test_features"
    ),
    right(
        "json_schema regex ebnf structural_tag response_format",
        "with `xgrammar`. Beside `ignore_eos` plain decoding notices a grammar's end a token late, so its answer has one more, which the "
        "grammar does not know; under any speculation SGLang ends the answer with its grammar",
        "conformance/request_cases/grammars",
        "conformance/test_requests",
    ),
    right("tools tool_choice", "", "conformance/request_cases/chat"),
    right("require_reasoning", "and the count of thoughts in an answer's usage", "e2e/test_settings"),
    right(
        "session_params session_id",
        "sessions without streaming; they belong to the tenant that opened them",
        "conformance/test_features",
    ),
    right(
        "input_embeds", "also after a retraction, which drops the whole answer", "conformance/test_in_process"
    ),
    right(
        "custom_logit_processor",
        "such a request gets plain steps, so it gains nothing",
        "conformance/test_requests",
    ),
    right(
        "custom_params",
        "`specstore` in it is ours: `conversation`, `group`, `tenant` and `workspace` are strings, `publish` and `sources` are true or false, and so is `draft`, or a list of "
        "sources, `nodes` is a count, `priors` is a list of names, `reference` is a string or a list of strings; another type or name is answered 400, and so is what "
        "`--specstore-request-wishes` does not list; a null is as if not given",
        "unit/entry/test_request_tenants",
        "unit/entry/test_request_wishes",
    ),
    right(
        "conversation_id metadata",
        "a client's session that they name is a conversation, and so is that of `session_id` and `session_params`",
        "unit/entry/test_request_conversations",
    ),
    right(
        "return_routed_experts routed_experts_start_len return_indexer_topk",
        "answered as if not asked for, as by any server without `--enable-return-routed-experts`",
        "conformance/test_requests",
    ),
    right("return_spec_tokens_details", "counts what was verified", "conformance/test_features"),
    right(
        "skip_special_tokens spaces_between_special_tokens continue_final_message return_prompt_token_ids return_token_ids "
        "return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext return_cached_tokens_details reasoning_effort",
        "",
        "conformance/test_requests",
    ),
    right(
        "priority extra_key cache_salt routing_key routed_dp_rank data_parallel_rank",
        "on a server without replicas; `priority` also where requests put others aside",
        "conformance/test_requests",
    ),
    refused(
        "SGLang sets them, no client",
        stop_strs=["a"],
        stop_regex_strs=["a"],
        stop_str_max_len=1,
        stop_regex_max_len=1,
        is_normalized=True,
    ),
    by_sglang("with any speculation", return_sampling_mask=True, beam_width=2),
    by_sglang("they need settings that are refused", lora_path="a", watermark={"enabled": True}),
    by_sglang("it needs `return_sampling_mask`", sampling_logprobs_mode="support"),
    untested("grammars of whole answers", "ebnf_full_assistant"),
    untested("bounds of thinking, and other names of it", "max_thinking_tokens reasoning thinking"),
    untested("scores of several texts in one prompt", "multi_item_delimiter_indices score_extraction_token"),
    untested("caches behind the GPU's", "kv_hints"),
    untested(
        "prefill and decode on separate instances: their router sets them",
        "bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size disagg_prefill_dp_rank need_wait_for_mm_inputs "
        "num_items_assigned encoder_urls",
    ),
    untested(
        "images, sounds and films",
        "image_data video_data audio_data images mm_hashes mm_content_hashes use_audio_in_video video_config modalities "
        "max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch images_config mm_processor_kwargs "
        "audio_duration_s positional_embed_overrides",
    ),
    no_part(
        "the prompt, and what is made of it before it is scheduled",
        "text input_ids prompt messages input instructions model sampling_params suffix chat_template_kwargs "
        "parallel_tool_calls max_tool_calls previous_response_id truncation task language file input_file_id purpose",
    ),
    no_part(
        "what is made of the tokens after they are chosen",
        "separate_reasoning stream_reasoning stream_options "
        "return_flat_raw_top_logprobs_b64 "
        ""
        "return_bytes return_entropy timestamp_granularities",
    ),
    no_part(
        "logs, metrics and housekeeping",
        "log_metrics no_logs custom_labels external_trace_header received_time http_worker_ipc user "
        "background store service_tier request_id endpoint completion_window",
    ),
    no_part(
        "of requests that decode nothing: embeddings, scores, tokenizers",
        "query items documents instruct top_n return_documents embed_override_token_id query_embed_overrides item_embed_overrides embed_overrides "
        "label_token_ids apply_softmax item_first return_token_logprobs return_pooled_hidden_states encoding_format dimensions tokens "
        "add_special_tokens add_generation_prompt questions prompt_format_version",
    ),
    no_part(
        "not for clients: SGLang sets it",
        "lora_id",
    ),
)

FLAGS = {
    "fp8_gemm_runner_backend": "--fp8-gemm-backend",
    "fp4_gemm_runner_backend": "--fp4-gemm-backend",
    "ep_join_mode": "--elastic-ep-join-mode",
    "ep_join_rank_offset": "--elastic-ep-join-rank-offset",
}


def flag(name: str) -> str:
    """What an operator writes for a setting; its name, where SGLang has no flag for it."""
    return name if name in WITHOUT_FLAG.names else FLAGS.get(name, "--" + name.replace("_", "-"))


INTRODUCTION = """\
# SGLang's settings and request fields beside speculation

This page says what becomes of SGLang's settings on a server whose `--speculative-algorithm` is one of ours, and of what a request may
ask for. It has every setting and every field of SGLang 0.5.23. `make settings` writes it, and tests compare it with SGLang
and try each refusal.

- **right**: with it, answers were compared with plain decoding's, greedy, token for token.
- **refused**: the start ends with one line that names the setting, or the request is answered 400. Some are refused by SGLang itself,
  beside some or all methods of speculation.
- **untested**: accepted, and no answer with it was compared.
- **no part in decoding**: nothing that chooses a token reads it.

None is known to be wrong.
"""


DRAFT_MODEL = """\
## The draft model

What becomes of a server's settings for the draft model of a method that has one. Its process is a server of SGLang's without requests.
What is said of the draft model holds as it stands. What is said of the target is followed as by SGLang's own draft models
(`STANDALONE`), if it was given: what SGLang chooses by itself it chooses anew for the draft model and its device. A default attention
backend whose KV has pages is replaced by `triton`; one that was named stops the start. A test gives each setting and looks at what
SGLang makes of it in the draft process (`tests/unit/plugin/test_draft_arguments.py`).
"""


def draft_rows() -> list[tuple[str, list[str]]]:
    """What becomes of settings for the draft model, and their names."""
    return [
        ("the draft model's own", list(arguments.OWN)),
        ("followed", list(arguments.FOLLOWED)),
        ("followed if its device is of the target's kind", list(arguments.FOLLOWED_ON_ITS_KIND)),
        ("followed so if its checkpoint is not quantised already", [arguments.QUANTIZATION]),
        ("set by specstore", SETTLED.split()),
        *((f"the target's alone: {about}", names.split()) for about, names in TARGET_ALONE.items()),
    ]


def draft_section() -> list[str]:
    rows = [
        f"| {about} | {', '.join(f'`{flag(name)}`' for name in names)} |" for about, names in draft_rows()
    ]
    groups = [
        f"| the target's alone: {about} | all others of SGLang's group `{group}` |"
        for group, about in TARGET_GROUPS.items()
    ]
    return [DRAFT_MODEL, "| what becomes of it | setting |", "|---|---|", *rows, *groups, ""]


def page() -> str:
    return "\n".join(
        [
            INTRODUCTION,
            *_section("Settings of a server", "setting", SETTINGS, flag),
            *draft_section(),
            *_section("Fields of a request", "field", REQUESTS, str),
        ]
    )


def _section(title: str, kind: str, rows: tuple[Row, ...], shown: Any) -> list[str]:
    lines = [f"## {title}", "", f"| {kind} | verdict | why, or what was seen |", "|---|---|---|"]
    tail = (Verdict.UNTESTED, Verdict.NO_PART)
    for row in rows:
        if row.verdict not in tail:
            tested = f" ({', '.join(f'`{test}`' for test in row.tests)})" if row.tests else ""
            lines.append(f"| {_values(row, shown)} | {row.verdict} | {row.about}{tested} |")
    for verdict in tail:
        lines += ["", f"### {title}: {verdict}", "", f"| what it concerns | {kind} |", "|---|---|"]
        lines += [f"| {row.about} | {_values(row, shown)} |" for row in rows if row.verdict is verdict]
    return [*lines, ""]


def _values(row: Row, shown: Any) -> str:
    values = row.given if row.shows else {}
    return ", ".join(f"`{shown(name)}{_value(values.get(name))}`" for name in row.names)


def _value(value: Any) -> str:
    return "" if value is None or value is True else f" {value}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    Path(__file__).with_suffix(".md").write_text(page())
