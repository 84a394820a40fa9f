"""Settings of the engine's host."""

# The data disk, and the folder on it that belongs to the service user.
storage = {
    "mount": "/mnt/data",
    "root": "/mnt/data/nvfp4",
}

# `link`: a path for people, a symlink to the content-addressed folder.
toolkit = {
    "link": "/mnt/data/nvfp4/cuda-12.8-full",
    # "redist": NVIDIA's archives; "mirror": the same layout at `location` (a URL, or a folder on
    # the host); "runfile": NVIDIA's .run, at `location` or, where that is None, at NVIDIA's;
    # "adopted": the tree `adopted`, which stands below toolkits/ since `cuda-install adopt`.
    "source": "redist",
    "location": None,
    # The release of the runfile, or that of the adopted tree: 12.8.1 or 12.8.0.
    "runfile": "12.8.1",
    # The adopted tree's name, as in "cuda-0123456789abcdef".
    "adopted": None,
    # Of the redistributable archives; after a change run script/lock.
    "components": [
        "cuda_nvcc",
        "cuda_cudart",
        "cuda_cccl",
        "cuda_nvrtc",
        "cuda_cuobjdump",
        "cuda_nvdisasm",
        "cuda_nvtx",
        "cuda_profiler_api",
        "cuda_cupti",
        "cuda_cuxxfilt",
        "libnvjitlink",
        "libcublas",
        "libcurand",
        "libcusparse",
        "libcusolver",
        "libcufft",
    ],
}
checkpoint = {
    "link": "/mnt/data/nvfp4/qwen38-uncensored-nvfp4-vl",
    # "fetch": whole, as it is; "assemble": from trunk and base. Both from where the lock says.
    "source": "fetch",
}

engine = {
    "name": "skinny",
    "python": "python3.12",
    "tensor_parallel_size": 4,
    "gpu_memory_utilization": 0.50,
    "max_model_len": 135168,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 4096,
    "num_speculative_tokens": 7,
    # Captured batch sizes per running sequence; None: (k+1) * 1 .. (k+1) * max(2, max_num_seqs).
    "cudagraph_capture_sizes": None,
    "dtype": "float16",
    "attention_backend": "FLASH_ATTN_V100",
    "reasoning_parser": "qwen3",
    "tool_call_parser": "qwen3_coder",
    "enable_thinking": True,
    # The socket that all four cards hang on; None: no pinning.
    "numa_node": 0,
    # Measure on the host first: seconds until a boot counts as failed (cold: with empty caches),
    # boots without an answer in a row until the release before is tried, and seconds for running
    # requests to finish before a stop.
    "boot_deadline_seconds": 900,
    "cold_boot_deadline_seconds": 1800,
    "failed_boots": 3,
    "drain_seconds": 120,
    "address_wait_seconds": 300,
    # The environment of the engine besides the toolkit's and the caches' places.
    "environment": {
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "TORCH_CUDA_ARCH_LIST": "7.0",
        "VLLM_SM70_NVFP4_TURBOMIND": "0",
        "VLLM_SM70_QUANT_BACKEND": "marlin",
        "VLLM_1CAT_ENABLE_SM70_MTP_DEFAULTS": "1",
        "VLLM_SKINNY_NVFP4": "1",
        "VLLM_SKINNY_QPN": "1",
        "VLLM_SKINNY_QPN2": "1",
        "VLLM_SKINNY_LMHEAD": "1",
        "VLLM_SKINNY_LMHEAD_NATIVE": "1",
        "VLLM_SKINNY_DROP_CT": "1",
        "VLLM_SM70_MTP_DYNAMIC_DRAFT_VOCAB_DEFAULT": "0",
        "VLLM_SM70_GDN_CHAIN_SPEC_FAST_BUILD": "1",
        "VLLM_SM70_QPN8_MT2": "1",
        "VLLM_FLASH_V100_DECODE_PARTITION_SIZE": "256",
        "VLLM_ENGINE_READY_TIMEOUT_S": "1800",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    },
    # Sizes of the model that the gates count by: fused FP8 modules a rank, rows of the vocabulary.
    "census_modules_per_rank": 128,
    "vocabulary_rows": 248320,
}

# Who may reach the serving port besides the host itself and the gateway: addresses or networks.
# None: not decided yet, and every deploy is refused, so that nobody is cut off unawares.
access: dict[str, list[str] | None] = {"consumers": None}
