"""vLLM's flags that Kiln does not have, and what to do instead.

Flags of vLLM's that mean the same as one of Kiln's are names of that flag, in ``engine_flags`` and
``serve_flags``; those that change nothing here are in ``neutral_flags``, with the values for which
that is so. The names are those of vLLM 0.22's ``vllm serve``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Flags -> the reason, and what to do.
_REASONS = {
    "--trust-remote-code --code-revision": "it never runs code from a model's folder; leave it out",
    "--skip-tokenizer-init": "a model without tokenizer files is served with token ids",
    "--tokenizer-mode": "the tokenizer's files decide",
    "--hf-config-path": "--hf-overrides changes config.json in the folder of MODEL",
    "--config-format": "it reads config.json of the Hugging Face format",
    "--hf-token": "log in with the Hugging Face tools, whose token it uses",
    "--rope-scaling --rope-theta": "--hf-overrides changes config.json",
    "--download-dir": "the Hugging Face tools' own variables say where files are kept",
    "--safetensors-load-strategy": "weights are always mapped and read once",
    "--model-loader-extra-config": "weights are safetensors files and are read directly",
    "--prefix-caching-hash-algo": "prefixes are compared as a whole, not by a hash",
    "--enable-chunked-prefill": "prompts are always chunked to the token budget",
    "--swap-space": "a preempted request is computed again, not swapped; leave it out",
    "--cpu-offload-gb": "weights stay on the device",
    "--kv-cache-memory-bytes": "use --num-kv-blocks, or --gpu-memory-utilization",
    "--calculate-kv-scales": "an 8-bit KV pool needs no scales here",
    "--kv-transfer-config": "prefill and decode run in one engine",
    "--kv-events-config": "it publishes no events of the KV pool",
    "--pipeline-parallel-size -pp --data-parallel-size -dp --decode-context-parallel-size": (
        "it has tensor parallelism (--tensor-parallel-size) and replicas (examples/ray_serve)"
    ),
    "--enable-expert-parallel": "experts are shared among the ranks of --tensor-parallel-size",
    "--distributed-executor-backend": "its ranks are processes, its own or torchrun's",
    "--nnodes --headless": "torchrun starts ranks on several machines",
    "--disable-custom-all-reduce": "KILN_ALL_REDUCE=torch uses NCCL",
    "--attention-backend": "environment variables choose kernels; see kiln env",
    "--compilation-config -O": "KILN_COMPILE and the flags of CUDA graphs stand for it",
    "--max-cpu-loras": "--lora-host-memory-gib limits the loaded adapters by their bytes",
    "--lora-dtype": "adapters are computed in the model's dtype",
    "--fully-sharded-loras": "adapters are shared among the ranks as their layers are",
    "--api-server-count": "one process serves HTTP; for more, examples/ray_serve",
    "--uds": "it listens on --host and --port",
    "--uvicorn-log-level": "--log-level sets the level of all logs",
    "--enable-log-requests": "--access-log logs a line a request, without its text",
    "--enable-log-outputs --max-log-len": "it never logs prompts or answers",
    "--log-config-file": "--log-level and --log-format decide on all logs, which go to stderr",
    "--allow-credentials": "it uses no cookies: browsers send the key as a header",
    "--allowed-methods": "--allowed-origins allows every method of a route",
    "--allowed-headers": "--allowed-origins allows every header",
    "--middleware": "put a proxy before it",
    "--disable-fastapi-docs": "/docs and /openapi.json are always served, behind the API key",
    "--return-tokens-as-token-ids": "a request asks for return_token_ids",
    "--tool-parser-plugin --reasoning-parser-plugin": "the tool and reasoning parsers are built in",
    "--tool-server": "clients run the tools",
    "--trust-request-chat-template": "templates come from the model or from --chat-template",
    "--response-role": "answers have the role assistant",
    "--chat-template-content-format": "what the template iterates over decides the form",
    "--structured-outputs-config --guided-decoding-backend": (
        "structured outputs are always made with llguidance"
    ),
    "--logits-processors": "logit_bias of a request edits logits",
    "--generation-config": "defaults come from generation_config.json in the folder of MODEL",
    "--override-generation-config": "edit generation_config.json in the folder of MODEL",
    "--max-logprobs": "a request may ask for 20 log-probabilities",
    "--logprobs-mode": "log-probabilities are those at temperature 1, before any filter",
    "--model-impl": "it runs its own implementations of the models",
    "--runner --convert": "--task embed serves embeddings",
    "--pooler-config": "modules.json in the folder of MODEL says how embeddings are made",
    "--limit-mm-per-prompt --mm-processor-kwargs --allowed-local-media-path "
    "--allowed-media-domains": "it serves text only",
    "--enable-prompt-embeds": "prompts are texts or token ids",
    "--collect-detailed-traces": "a span has the times of its whole request; leave it out",
    "--enable-sleep-mode": "stop the server to free the device",
    "--config": "write the flags on the command line",
}
ABSENT: Mapping[str, str] = MappingProxyType(
    {name: reason for names, reason in _REASONS.items() for name in names.split()}
)
