"""Embeddings: how a model's final hidden states become a vector, and what a request has of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kiln.engine.errors import RequestError
from kiln.engine.requests.sampling_params import MAX_COUNT, shown

PoolingType = Literal["LAST", "MEAN", "CLS"]  # vLLM's names


@dataclass(frozen=True, slots=True)
class Embedder:
    """How a model makes embeddings of ``size`` elements.

    ``pooling``: from the final hidden state of the last token, from the mean of all tokens, or from
    the first token (CLS). ``normalize``: they have length 1.
    """

    size: int
    pooling: PoolingType = "LAST"
    normalize: bool = True


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """What a request may say about its embeddings, with vLLM's names.

    ``dimensions`` keeps that many elements, before the vector gets length 1. ``use_activation``:
    whether it gets length 1; None: as the model's folder says. ``truncate_prompt_tokens`` keeps
    that many tokens at the end of a prompt, -1 as many as fit the context. Raises RequestError.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check the types and ranges."""
        _check("dimensions", self.dimensions, least=1)
        _check("truncate_prompt_tokens", self.truncate_prompt_tokens, least=-1)
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens must be -1 or a count, got 0", "truncate_prompt_tokens"
            )
        if not isinstance(self.use_activation, bool | None):
            raise RequestError(
                f"use_activation must be true, false or null, got {shown(self.use_activation)}",
                "use_activation",
            )


def _check(name: str, value: object, least: int) -> None:
    if value is not None and not (type(value) is int and least <= value <= MAX_COUNT):
        raise RequestError(f"{name} must be {least} or more, got {shown(value)}", name)


class HiddenPart(NamedTuple):
    """Tokens of a request's part of a step, the first one ``offset`` behind its first."""

    offset: int
    num_tokens: int


class Pooled(NamedTuple):
    """What a request has of its embedding: the mean over the tokens ``start`` to ``end - 1``.

    The final hidden states of those before ``done`` are summed up in ``total``, a tensor on the
    host, float64 [hidden_size]; None before the first of them.
    """

    start: int
    end: int
    done: int
    total: Any = None

    @classmethod
    def begin(cls, pooling: PoolingType, num_tokens: int) -> Pooled:
        """Return what a request of ``num_tokens`` tokens begins with."""
        start = num_tokens - 1 if pooling == "LAST" else 0
        return cls(start, 1 if pooling == "CLS" else num_tokens, start)

    def part(self, start: int, count: int) -> HiddenPart | None:
        """Return the part of a step that is to be summed up, if any is.

        The step computes ``count`` tokens from position ``start`` on. What a preempted request has
        summed up before is not summed up again.
        """
        first, end = max(start, self.done), min(start + count, self.end)
        return HiddenPart(first - start, end - first) if first < end else None

    def plus(self, start: int, part: HiddenPart, hidden: Any) -> Pooled:
        """Add the sum of a part of a step that began at position ``start``."""
        # Steps are committed in order, and a preempted request runs again only after them.
        assert start + part.offset == self.done, "a part is missing, or comes twice"
        hidden = hidden.double()
        total = hidden if self.total is None else self.total + hidden
        return self._replace(done=self.done + part.num_tokens, total=total)

    def from_start(self) -> Pooled:
        """Return the same before any hidden state is summed up."""
        return self._replace(done=self.start, total=None)

    @property
    def is_complete(self) -> bool:
        """Whether all hidden states are summed up."""
        return self.done == self.end

    @property
    def embedding(self) -> bytes:
        """The mean as float32 [hidden_size], once it is complete."""
        vector: bytes = (self.total / (self.end - self.start)).float().numpy().tobytes()
        return vector


@dataclass(slots=True)
class EmbeddingOutput:
    """An embedding, with vLLM's name."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt of ``LLM.embed``.

    ``num_cached_tokens`` of the prompt were not computed, because they were known.
    """

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
