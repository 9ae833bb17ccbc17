"""Which settings of vLLM matter to keys and values: every field of its config classes.

A field is of one of three kinds. Fields that do not matter have a reason. Mapped fields go into the
ModelRecord, or are compared or refused elsewhere. Fields that count salt the record, with vLLM's
version, when they differ from their default: they change what a model computes, and no other engine
has them. A field that is in no list salts as well, and is logged.

A class that is not listed here counts or does not count as a whole: its field in VllmConfig says
why. Source: vllm 0.26, 0.28, 0.29, 0.32 config/*.py
"""

from __future__ import annotations

# The fields of VllmConfig, and of the classes below, whose own fields are listed.
WALKED = (
    "model_config",
    "cache_config",
    "parallel_config",
    "scheduler_config",
    "device_config",
    "load_config",
    "attention_config",
    "kernel_config",
    "compilation_config",
)

DO_NOT_MATTER: dict[str, dict[str, str]] = {
    "VllmConfig": {
        "requests with LoRA have it in the name of their adapter, and others are as without it": (
            "lora_config"
        ),
        "drafts propose tokens, and the model itself computes those that are accepted; layers of a "
        "draft model are refused": "speculative_config",
        "how layers with a state are computed; what would change their numbers is refused": (
            "mamba_config"
        ),
        "what chooses among the logits comes after the keys and values": (
            "structured_outputs_config reasoning_config watermark_config"
        ),
        "what is observed, logged or sent to others": (
            "observability_config profiler_config kv_events_config logging_config "
            "aux_output_config instance_id shutdown_timeout"
        ),
        "where weights, tables or caches lie": "offload_config engram_config",
        "requests with images or sounds are then neither stored nor loaded": (
            "ec_transfer_config ec_manager_config"
        ),
        "this connector's own settings": "kv_transfer_config",
        "how fast it is: graphs, kernels, batches": "optimization_level performance_mode",
    },
    "ModelConfig": {
        "token ids are the key, whoever made them": (
            "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init renderer_num_workers "
            "io_processor_plugin"
        ),
        "what is asked of the hidden states or logits comes after the keys and values": (
            "runner convert pooler_config max_logprobs logprobs_mode use_fp64_gumbel "
            "return_sampling_mask enable_trace_replay logits_processors "
            "enable_return_routed_experts seed"
        ),
        "names, and where files come from: the files themselves count": (
            "served_model_name hf_token revision allowed_local_media_path allowed_media_domains"
        ),
        "what becomes of images, sounds and embeddings is in their digests": (
            "multimodal_config enable_prompt_embeds"
        ),
        "how the same operations are run": (
            "enforce_eager disable_cascade_attn enable_sleep_mode sleep_mode_backend "
            "sleep_preserve_parameter_names sleep_mode_offload_cudagraph "
            "enable_nccl_comm_suspend enable_cumem_allocator"
        ),
        "it permits a method; the method itself is mapped": "allow_deprecated_quantization",
        "code that is run is in the model's files, and counts": "trust_remote_code",
        "found out from the files": "word_embeddings_untied_by_checkpoint is_submodel_config",
        "of draft models, whose layers are refused": "spec_target_max_model_len",
        "precision of attention's arithmetic, not its meaning": "override_attention_dtype",
    },
    "CacheConfig": {
        "how large blocks are, how many there are and how long they are kept": (
            "block_size user_specified_block_size prefix_match_unit gpu_memory_utilization "
            "num_gpu_blocks_override enable_prefix_caching prefix_caching_hash_algo num_gpu_blocks "
            "num_cpu_blocks kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes "
            "kv_offloading_size kv_offloading_backend _block_size_resolved skip_page_size_padded "
            "kv_cache_layout prefix_cache_retention_interval effective_attention_block_size "
            "hash_block_size cache_hit_alignment_tokens"
        ),
        "where the states of hybrid models lie; their dtypes are in the record's salts": (
            "user_specified_mamba_block_size mamba_page_size_padded mamba_block_size "
            "mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode "
            "enable_mamba_shared_prefix_checkpoint"
        ),
        "models and modes with these are refused": (
            "is_attention_free replayssm_buffer_len use_replayssm use_kda_recoverssm "
            "kv_sharing_fast_prefill swa_bounded_replay"
        ),
    },
    "ParallelConfig": {
        "how one computation is shared out: entries name the layers and heads that they hold": (
            "pipeline_parallel_size tensor_parallel_size data_parallel_size "
            "data_parallel_size_local data_parallel_rank data_parallel_rank_local "
            "data_parallel_index data_parallel_external_lb data_parallel_hybrid_lb is_moe_model "
            "enable_expert_parallel enable_ep_weight_filter enable_eplb eplb_config "
            "expert_placement_strategy all2all_backend enable_elastic_ep elastic_ep_max_dp_size "
            "enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold "
            "world_size rank enable_batch_sharded_sampling enable_hc_sp dp_sync_interval"
        ),
        "where processes run, and how they talk": (
            "data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port "
            "data_parallel_backend max_parallel_loading_workers disable_custom_all_reduce "
            "disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env "
            "placement_group distributed_executor_backend worker_cls sd_worker_cls master_addr "
            "master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus "
            "assigned_physical_gpu_ids distributed_timeout_seconds cpu_distributed_timeout_seconds "
            "_data_parallel_master_port_list _coord_store_port _api_process_count "
            "_api_process_rank enable_fault_tolerance fault_tolerance_config "
            "enable_shm_tensor_arena"
        ),
        "of context parallelism, which is refused": (
            "dcp_kv_cache_interleave_size dcp_comm_backend cp_kv_cache_interleave_size "
            "dcp_q_replicate _allow_auto_resolve_cp_interleave_size"
        ),
    },
    "SchedulerConfig": {
        "which tokens are computed when, in which batch; a token's keys and values depend on those "
        "before it alone": (
            "runner_type max_num_batched_tokens max_num_scheduled_tokens max_num_seqs "
            "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold "
            "long_prefill_token_threshold_adaptive enable_chunked_prefill is_multimodal_model "
            "max_num_encoder_input_tokens encoder_cache_size policy disable_chunked_mm_input "
            "scheduler_cls disable_hybrid_kv_cache_manager scheduler_reserve_full_isl watermark "
            "prefill_schedule_interval async_scheduling stream_interval max_num_queued_reqs "
            "max_num_queued_tokens max_num_active_seqs"
        ),
    },
    "DeviceConfig": {"where the same operations are run": "device device_type"},
    "LoadConfig": {
        "how files are read, not which": (
            "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
            "safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location"
        ),
    },
    "AttentionConfig": {
        "kernels, and the precision of the arithmetic in them": (
            "backend backend_per_kind flash_attn_version use_prefill_decode_attention "
            "flash_attn_max_num_splits_for_cuda_graph tq_max_kv_splits_for_cuda_graph "
            "use_trtllm_attention disable_flashinfer_q_quantization mla_prefill_backend "
            "use_prefill_query_quantization sparse_mla_force_mqa flex_attn_block_m "
            "flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size "
            "minimax_m3_msa_decode_backend tokenspeed_mla_min_split_kv hisparse_config "
            "sparse_mla_prefill_workspace_factor"
        ),
    },
    "KernelConfig": {
        "kernels for the same operations": (
            "ir_op_priority enable_flashinfer_autotune enable_cutedsl_warmup "
            "enable_bf16x3_router_gemm enable_jit_warmup enable_rocm_segmented_attn_autotune "
            "sparse_indexer_topk_backend"
        ),
    },
    "CompilationConfig": {
        "how the same operations are compiled, fused and replayed": (
            "mode debug_dump_path cache_dir compile_cache_save_format backend custom_ops "
            "ir_enable_torch_wrap splitting_ops compile_mm_encoder cudagraph_mm_encoder "
            "encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch "
            "encoder_cudagraph_max_frames_per_batch compile_sizes compile_ranges_endpoints "
            "inductor_compile_config inductor_passes cudagraph_mode cudagraph_num_of_warmups "
            "cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_specialize_lora "
            "use_inductor_graph_partition pass_config max_cudagraph_capture_size "
            "dynamic_shapes_config local_cache_dir fast_moe_cold_start enabled_custom_ops "
            "disabled_custom_ops traced_files compilation_time encoder_compilation_time "
            "static_forward_context static_all_moe_layers cudagraph_decoder_replay "
            "decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold"
        ),
    },
}

MAPPED: dict[str, dict[str, str]] = {
    "VllmConfig": {
        "ModelRecord.quantization, by what model_config says of it": "quant_config",
        "refused: tokens see those after them": "diffusion_config",
    },
    "ModelConfig": {
        "ModelRecord.files": "model hf_config_path",
        "refused without a fingerprint of one's own: the weights are elsewhere": "model_weights",
        "ModelRecord.architecture, rope and overrides": (
            "hf_config hf_text_config hf_overrides max_model_len generation_config "
            "override_generation_config"
        ),
        "ModelRecord.quantization": "quantization quantization_config",
        "ModelRecord.salts: the class that computes the model": "model_impl",
        "CacheFacts.compute_dtype": "dtype",
    },
    "CacheConfig": {
        "the dtype of each layer, as it is stored": "cache_dtype kv_cache_dtype_skip_layers",
        "CacheFacts.window": "sliding_window",
        "refused": "calculate_kv_scales",
    },
    "ParallelConfig": {
        "refused": "decode_context_parallel_size prefill_context_parallel_size",
    },
    "LoadConfig": {"ModelRecord.weights": "load_format"},
    "AttentionConfig": {"refused: tokens see those after them": "use_non_causal"},
}

COUNT: dict[str, dict[str, str]] = {
    "VllmConfig": {
        "settings of platforms that vLLM does not know itself": "additional_config",
        "weights change while the engine runs": "weight_transfer_config",
    },
    "ModelConfig": {
        "another class computes the model": "model_class_overrides",
        "code of another repository may be run": "code_revision",
        "the config may be another file": "config_format",
        "the window is in CacheFacts, and those that differ in it cannot load from each other": (
            "disable_sliding_window"
        ),
    },
    "ParallelConfig": {"a class that may replace the worker's parts": "worker_extension_cls"},
    "LoadConfig": {
        "which files are loaded, or adapters merged into them": (
            "model_loader_extra_config ignore_patterns"
        ),
    },
    "KernelConfig": {
        "some quantise activations too, and some weights alone": (
            "moe_backend linear_backend linear_backend_per_quant"
        ),
    },
    "AttentionConfig": {
        "which tokens a layer looks at depends on it": (
            "indexer_kv_dtype use_fp4_indexer_cache indexer_sparse_logits"
        ),
    },
}

# Variables of the environment that count where they are set.
# Source: vllm 0.32 envs.py
ENVIRONMENT: dict[str, str] = {
    "another load_format than the configuration's": "VLLM_TEST_FORCE_LOAD_FORMAT",
    "weights or activations are quantised when they are loaded or used": (
        "VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_MARLIN_INPUT_DTYPE "
        "VLLM_CPU_INT4_W4A8 VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_B12X_MOE_FP4_FORCE_A16 "
        "VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE "
        "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 "
        "VLLM_ROCM_FP8_MFMA_PAGE_ATTN VLLM_DISABLED_KERNELS VLLM_USE_DEEP_GEMM_E8M0"
    ),
    "tokens go to experts that are not the model's choice": "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
}
