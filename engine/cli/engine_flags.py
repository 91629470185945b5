"""The flags of the engine's settings: one table a group."""

from __future__ import annotations

from kiln.engine.cli.flags import Flag, group
from kiln.engine.cli.several import is_number, is_pair_like
from kiln.engine.config import dtype_named

MODEL = group(
    "model",
    Flag(
        "--revision",
        "branch, tag or commit of MODEL on the hub; default: its main branch",
        "model.revision",
    ),
    Flag(
        "--tokenizer",
        "folder or hub id of the tokenizer and its chat templates; default: MODEL",
        "model.tokenizer",
    ),
    Flag(
        "--tokenizer-revision",
        "branch, tag or commit of the tokenizer's repository; without --tokenizer that of MODEL",
        "model.tokenizer_revision",
        metavar="REVISION",
    ),
    Flag(
        "--hf-overrides",
        "merged into config.json, objects key by key, as in "
        '{"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}; null removes a key',
        "model.hf_overrides",
        metavar="JSON",
    ),
    Flag(
        "--dtype",
        "auto, the default: the checkpoint's, float32 on a CPU. Also half and fp16, bf16, float "
        "and fp32",
        "model.dtype",
        type=dtype_named,
    ),
    Flag("--device", "auto, cpu, cuda or cuda:N", "model.device"),
    Flag("--load-format", "dummy: random weights of the right shapes", "model.load_format"),
    Flag(
        "--quantization -q",
        "fp8: quantise weights of floats when they are loaded; a checkpoint that is quantised "
        "needs no flag",
        "model.quantization",
        metavar="METHOD",
    ),
    Flag(
        "--max-model-len",
        "longest prompt and answer together; default: the model's",
        "model.max_model_len",
        metavar="TOKENS",
    ),
    Flag("--seed", "for requests without one; default: random", "model.seed", metavar="SEED"),
    Flag(
        "--task",
        "generate text, or embed: embeddings of texts; default auto: embed if the folder has the "
        "format of sentence-transformers or a model without a head, else generate",
        "model.task",
    ),
    Flag(
        "--tensor-parallel-size --tp -tp",
        "share the model among N GPUs of this machine, or N processes on a CPU; default 1, "
        "under torchrun the number of its processes",
        "parallel.tensor_parallel_size",
    ),
)
KV = group(
    "KV pool",
    Flag("--block-size", "tokens of a KV block; default 16", "kv.block_size", metavar="TOKENS"),
    Flag(
        "--num-kv-blocks --num-gpu-blocks-override",
        "number of KV blocks; default: what fits in memory",
        "kv.num_blocks",
    ),
    Flag(
        "--kv-memory-gib",
        "size of the KV pool on a CPU; default 1",
        "kv.kv_memory_gib",
        metavar="GIB",
    ),
    Flag(
        "--gpu-memory-utilization",
        "fraction of the GPU's memory that Kiln may use; default 0.9",
        "kv.gpu_memory_utilization",
        metavar="SHARE",
    ),
    Flag(
        "--kv-cache-dtype",
        "8-bit floats store twice the tokens, with the checkpoint's scales if it has any; default: "
        "the model's dtype",
        "kv.kv_cache_dtype",
    ),
    Flag(
        "--no-enable-prefix-caching",
        "compute every prompt as a whole; by default the keys and values of prompts and answers "
        "stay while there is room, for requests that begin with the same tokens",
        "kv.enable_prefix_caching",
        switch=False,
    ),
    Flag(
        "--kv-offload-gib --kv-offloading-size",
        "host memory, of all ranks together, for keys and values that no longer fit on the "
        "device; they are copied back when a request begins with the same tokens; default 0",
        "kv.kv_offload_gib",
        metavar="GIB",
    ),
)
SCHEDULER = group(
    "scheduler",
    Flag(
        "--max-num-seqs",
        "requests that run at once; default 256 on a GPU, 64 on a CPU",
        "scheduler.max_num_seqs",
    ),
    Flag(
        "--max-num-batched-tokens",
        "token budget of a step; default 2048 on a CPU; on a GPU the largest of 2048 to 8192 "
        "whose step takes less than 50 ms by an estimate from the model and the card",
        "scheduler.max_num_batched_tokens",
    ),
    Flag(
        "--max-chunk-tokens --long-prefill-token-threshold",
        "longest chunk of one prefill",
        "scheduler.max_chunk_tokens",
    ),
    Flag(
        "--max-waiting",
        "requests that wait; further ones get 503; default 1024",
        "scheduler.max_waiting",
    ),
    Flag(
        "--scheduling-policy",
        "fcfs, the default: in the order of arrival; priority: requests with a lower priority "
        "first, and 30 s of waiting count as one less",
        "scheduler.scheduling_policy",
    ),
    Flag(
        "--speculative-config",
        "guess tokens and verify several in one step, where that pays, as in "
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, '
        '"prompt_lookup_min": 2}',
        metavar="JSON",
    ),
    Flag(
        "--disable-overlap-schedule --no-async-scheduling",
        "launch a step only after the tokens of the one before are known",
        "scheduler.overlap",
        switch=False,
    ),
)
GRAPHS = group(
    "CUDA graphs",
    Flag(
        "--disable-cuda-graph --enforce-eager",
        "launch each kernel of a decode step",
        "graphs.enabled",
        switch=False,
    ),
    Flag(
        "--cuda-graph-max-bs --max-cudagraph-capture-size",
        "largest batch size to capture; default: max-num-seqs",
        "graphs.max_bs",
    ),
    Flag(
        "--cuda-graph-bs --cuda-graph-sizes --cudagraph-capture-sizes",
        "batch sizes to capture; default: about 30, an eighth apart",
        "graphs.bs",
        fits=is_number,
    ),
    Flag(
        "--enable-cudagraph-gc",
        "keep Python's garbage collector on during the capture, which takes longer",
        "graphs.garbage_collection",
        switch=True,
    ),
)
ENGINE = (MODEL, KV, SCHEDULER, GRAPHS)
LORA = group(
    "LoRA adapters",
    Flag(
        "--lora-modules",
        "adapters in PEFT's format to load at start; a request names one as its model",
        metavar="NAME=PATH",
        nargs="+",
        fits=is_pair_like,
    ),
    Flag(
        "--lora-root",
        "allow clients to load and unload adapters while serving, from folders inside DIR",
        "lora.root",
        metavar="DIR",
    ),
    Flag(
        "--max-loras",
        "adapters that run at once; requests of more wait for their turn. "
        "Default: all of --lora-modules, with --lora-root at least 8",
        "lora.max_loras",
    ),
    Flag("--max-lora-rank", "refuse larger ranks; graphs fit all up to it", "lora.max_lora_rank"),
    Flag(
        "--lora-memory-gib",
        "device memory for adapters, each of which takes that of its own ranks. Default: room "
        "for the N largest of --lora-modules, N as in --max-loras; with --lora-root at least 1",
        "lora.memory_gib",
        metavar="GIB",
    ),
    Flag(
        "--lora-host-memory-gib",
        "host memory, for all loaded adapters; default 16",
        "lora.host_memory_gib",
        metavar="GIB",
    ),
    Flag(
        "--enable-lora",
        "adapters are enabled by --lora-modules or --lora-root, one of which this needs",
        switch=True,
    ),
)
