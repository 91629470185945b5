"""From prompts to the requests for their embeddings, and from pooled states to embeddings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kiln.engine.errors import EmbeddingError, RequestError
from kiln.engine.requests.check import NO_EMBEDDINGS
from kiln.engine.requests.pooling import (
    Embedder,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingParams,
)
from kiln.engine.requests.request import NewRequest, TokenOutput
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.text.prompts import Prompt, PromptInput, last_tokens, read_prompts
from kiln.engine.text.tokenizer import Tokenizer

_NOTHING = SamplingParams()


def require_embedder(embedder: Embedder | None, params: PoolingParams) -> Embedder:
    """Return how a model makes embeddings.

    Raises RequestError if it makes none, or has fewer dimensions than are asked for.
    """
    if embedder is None:
        raise RequestError(NO_EMBEDDINGS, "model")
    wanted = params.dimensions
    if wanted is not None and wanted > embedder.size:
        raise RequestError(
            f"dimensions must be 1 to {embedder.size}, the size of the model's embeddings, got "
            f"{wanted}",
            "dimensions",
        )
    return embedder


def read_texts(
    prompts: PromptInput | Sequence[PromptInput],
    tokenizer: Tokenizer | None,
    params: PoolingParams,
    context: int,
    *,
    add_special_tokens: bool = True,
) -> list[Prompt]:
    """Tokenize what is to be embedded, and truncate it if asked. Raises RequestError."""
    most = context if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
    longest = context if most is None else sys.maxsize
    read = read_prompts(prompts, tokenizer, longest, add_special_tokens=add_special_tokens)
    return [last_tokens(prompt, most) for prompt in read]


@dataclass(slots=True)
class EmbeddingJob:
    """The embeddings of one call: ``requests`` for the engine by id, and what has come of them."""

    embedder: Embedder
    params: PoolingParams
    requests: dict[str, NewRequest] = field(default_factory=dict)
    vectors: dict[str, np.ndarray] = field(default_factory=dict)  # [dimensions] float32
    outputs: dict[str, TokenOutput] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """How many tokens all prompts have."""
        return sum(len(new.prompt_token_ids) for new in self.requests.values())

    def ask(self, name: str, prompt: Prompt, adapter: str | None, priority: int) -> NewRequest:
        """Add the request for the embedding of a prompt, and return it."""
        new = NewRequest(
            name,
            prompt.token_ids,
            _NOTHING,
            adapter,
            priority=priority,
            cache_salt=prompt.cache_salt,
            pooling=self.embedder.pooling,
        )
        self.requests[name] = new
        return new

    def take(self, output: TokenOutput) -> None:
        """Keep what the engine has computed. Raises EmbeddingError if it failed."""
        if output.embedding is None:
            index = list(self.requests).index(output.request_id)
            raise EmbeddingError(f"prompt {index}: {output.message or 'the engine failed'}")
        self.outputs[output.request_id] = output
        self.vectors[output.request_id] = self._finished(output.embedding)

    def results(self) -> list[EmbeddingRequestOutput]:
        """Return the embeddings in the order of the requests, when all have come."""
        return [
            EmbeddingRequestOutput(
                name,
                EmbeddingOutput(self.vectors[name].tolist()),
                new.prompt_token_ids,
                num_cached_tokens=self.outputs[name].num_cached_tokens,
            )
            for name, new in self.requests.items()
        ]

    def _finished(self, pooled: bytes) -> np.ndarray:
        """Cut a vector to the dimensions asked for, then give it length 1 if asked for."""
        params, vector = self.params, np.frombuffer(pooled, np.float32)[: self.params.dimensions]
        if not (
            self.embedder.normalize if params.use_activation is None else params.use_activation
        ):
            return vector
        exact = vector.astype(np.float64)
        return (exact / max(float(np.linalg.norm(exact)), 1e-12)).astype(np.float32)
