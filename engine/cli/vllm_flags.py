"""vLLM's flags that Kiln does not have, and what to do instead.

Flags of vLLM's that mean the same as one of Kiln's are names of that flag, in ``engine_flags`` and
``serve_flags``; those that change nothing here are in ``neutral_flags``, with the values for which
that is so. The names are those of vLLM 0.22's ``vllm serve``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_TOOLS = "the tool and reasoning parsers are built in"
_MEDIA = "it serves text only"
_GRAMMAR = "structured output is not supported yet"
_TLS = "put a proxy that ends TLS before it"
_REMOTE = "it never runs code from a model's folder; leave it out"
_FILES = "give MODEL as a folder that holds the files you want"
_RANKS = "it has tensor parallelism (--tensor-parallel-size) and replicas (examples/ray_serve)"
_KERNELS = "environment variables choose kernels; see kiln env"
# Flag -> the reason, and what to do.
ABSENT: Mapping[str, str] = MappingProxyType(
    {
        "--trust-remote-code": _REMOTE,
        "--tokenizer": "it reads the tokenizer in the folder of MODEL; put the files there",
        "--skip-tokenizer-init": "a model without tokenizer files is served with token ids",
        "--tokenizer-mode": "the tokenizer's files decide",
        "--tokenizer-revision": _FILES,
        "--revision": _FILES,
        "--code-revision": _REMOTE,
        "--hf-config-path": _FILES,
        "--config-format": "it reads config.json of the Hugging Face format",
        "--hf-token": "log in with the Hugging Face tools, whose token it uses",
        "--hf-overrides": "edit config.json in the folder of MODEL",
        "--rope-scaling": "edit config.json in the folder of MODEL",
        "--rope-theta": "edit config.json in the folder of MODEL",
        "--download-dir": "the Hugging Face tools' own variables say where files are kept",
        "--safetensors-load-strategy": "weights are always mapped and read once",
        "--model-loader-extra-config": "weights are safetensors files and are read directly",
        "--quantization": "quantised checkpoints are not supported yet",
        "-q": "quantised checkpoints are not supported yet",
        "--prefix-caching-hash-algo": "prefixes are compared as a whole, not by a hash",
        "--enable-chunked-prefill": "prompts are always chunked to the token budget",
        "--swap-space": "a preempted request is computed again, not swapped; leave it out",
        "--cpu-offload-gb": "weights stay on the device",
        "--kv-cache-memory-bytes": "use --num-kv-blocks, or --gpu-memory-utilization",
        "--kv-offloading-size": "the KV pool stays on the device",
        "--calculate-kv-scales": "an 8-bit KV pool needs no scales here",
        "--kv-transfer-config": "prefill and decode run in one engine",
        "--kv-events-config": "it publishes no events of the KV pool",
        "--pipeline-parallel-size": _RANKS,
        "-pp": _RANKS,
        "--data-parallel-size": _RANKS,
        "-dp": _RANKS,
        "--enable-expert-parallel": "experts are shared among the ranks of --tensor-parallel-size",
        "--decode-context-parallel-size": _RANKS,
        "--distributed-executor-backend": "its ranks are processes, its own or torchrun's",
        "--nnodes": "torchrun starts ranks on several machines",
        "--headless": "torchrun starts ranks on several machines",
        "--disable-custom-all-reduce": "KILN_ALL_REDUCE=torch uses NCCL",
        "--attention-backend": _KERNELS,
        "--compilation-config": "KILN_COMPILE and the flags of CUDA graphs stand for it",
        "-O": "KILN_COMPILE and the flags of CUDA graphs stand for it",
        "--max-cpu-loras": "--lora-host-memory-gib limits the loaded adapters by their bytes",
        "--lora-dtype": "adapters are computed in the model's dtype",
        "--fully-sharded-loras": "adapters are shared among the ranks as their layers are",
        "--api-server-count": "one process serves HTTP; for more, examples/ray_serve",
        "--uds": "it listens on --host and --port",
        "--uvicorn-log-level": "--log-level sets the level of all logs",
        "--enable-log-requests": "--log-level info logs a line a request, without its text",
        "--enable-log-outputs": "it never logs prompts or answers",
        "--max-log-len": "it never logs prompts or answers",
        "--log-config-file": "--log-level sets the level of all logs, which go to stderr",
        "--allow-credentials": "it uses no cookies: browsers send the key as a header",
        "--allowed-methods": "--allowed-origins allows every method of a route",
        "--allowed-headers": "--allowed-origins allows every header",
        "--ssl-keyfile": _TLS,
        "--ssl-certfile": _TLS,
        "--ssl-ca-certs": _TLS,
        "--ssl-cert-reqs": _TLS,
        "--ssl-ciphers": _TLS,
        "--enable-ssl-refresh": _TLS,
        "--root-path": "let the proxy take the prefix off the path",
        "--middleware": "put a proxy before it",
        "--disable-fastapi-docs": "/docs and /openapi.json are always served, behind the API key",
        "--return-tokens-as-token-ids": "a request asks for return_token_ids",
        "--tool-parser-plugin": _TOOLS,
        "--reasoning-parser-plugin": _TOOLS,
        "--tool-server": "clients run the tools",
        "--trust-request-chat-template": "templates come from the model or from --chat-template",
        "--response-role": "answers have the role assistant",
        "--chat-template-content-format": "what the template iterates over decides the form",
        "--structured-outputs-config": _GRAMMAR,
        "--guided-decoding-backend": _GRAMMAR,
        "--logits-processors": "logit_bias of a request edits logits",
        "--generation-config": "defaults come from generation_config.json in the folder of MODEL",
        "--override-generation-config": "edit generation_config.json in the folder of MODEL",
        "--max-logprobs": "a request may ask for 20 log-probabilities",
        "--logprobs-mode": "log-probabilities are those at temperature 1, before any filter",
        "--model-impl": "it runs its own implementations of the models",
        "--runner": "it generates text, and has no other task",
        "--task": "it generates text, and has no other task",
        "--convert": "it generates text, and has no other task",
        "--pooler-config": "it generates text, and has no other task",
        "--limit-mm-per-prompt": _MEDIA,
        "--mm-processor-kwargs": _MEDIA,
        "--allowed-local-media-path": _MEDIA,
        "--allowed-media-domains": _MEDIA,
        "--enable-prompt-embeds": "prompts are texts or token ids",
        "--otlp-traces-endpoint": "/metrics has its counts and latencies",
        "--enable-sleep-mode": "stop the server to free the device",
        "--config": "write the flags on the command line",
    }
)


def without_negation(name: str) -> str:
    """Return the name under which ``--no-x`` is listed too."""
    return f"--{name[5:]}" if name.startswith("--no-") else name
