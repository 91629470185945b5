"""What a trace says of a request, by the names of OpenTelemetry's conventions for generative AI.

Beside them stand the names of vLLM's spans, for the dashboards that know those.
Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kiln.engine.server.generation import Generation
from kiln.engine.server.protocol import ChatCompletionRequest
from kiln.engine.server.tracing import MODEL, OPERATION
from kiln.engine.text.embeddings import EmbeddingJob


def generation_attributes(generation: Generation) -> Mapping[str, Any]:
    """Return the attributes of a generation as far as it has come; times are in seconds."""
    params, usage = generation.params, generation.usage
    chats = isinstance(generation.body, ChatCompletionRequest)
    reasons = [one.finish_reason for one in generation.completions if one.finish_reason is not None]
    found = {
        OPERATION: "chat" if chats else "text_completion",
        MODEL: generation.body.model or generation.served.name,
        "gen_ai.response.model": generation.served.name,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.n": params.n,
        "gen_ai.response.finish_reasons": reasons or None,
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "gen_ai.latency.time_in_queue": generation.queue_seconds,
        "gen_ai.latency.time_to_first_token": generation.first_token_seconds,
        **_usage(usage["prompt_tokens"], usage["completion_tokens"]),
    }
    return {name: value for name, value in found.items() if value is not None}


def embedding_attributes(job: EmbeddingJob, asked: str | None, served: str) -> Mapping[str, Any]:
    """Return the attributes of a request for embeddings."""
    return {
        OPERATION: "embeddings",
        MODEL: asked or served,
        "gen_ai.response.model": served,
        "gen_ai.embeddings.dimension.count": job.embedder.size,
        **_usage(job.num_tokens, 0),
    }


def _usage(prompt: int, output: int) -> dict[str, int]:
    return {
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": output,
        "gen_ai.usage.prompt_tokens": prompt,
        "gen_ai.usage.completion_tokens": output,
    }
