"""What can be refused of a request when it comes: prompts and tokens that the model cannot have."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kiln.engine.errors import RequestError, too_long
from kiln.engine.requests.pooling import Embedder
from kiln.engine.requests.request import NewRequest

NO_EMBEDDINGS = (
    "this model generates text: embeddings need a model in the format of sentence-transformers, or "
    "any other that was started with --task embed"
)
ONLY_EMBEDDINGS = (
    "this model was loaded for embeddings and does not generate text: use /v1/embeddings or "
    "LLM.embed, or start with --task generate"
)


def check_task(new: NewRequest, embedder: Embedder | None) -> None:
    """Refuse what the model was not loaded for. Raises RequestError."""
    if (new.pooling is None) != (embedder is None):
        raise RequestError(NO_EMBEDDINGS if embedder is None else ONLY_EMBEDDINGS, "model")


def check_tokens(
    new: NewRequest, context: int, vocab_size: int, image_token_ids: Collection[int] = ()
) -> None:
    """Check a request for a model of ``context`` and ``vocab_size`` tokens. Raises RequestError.

    ``image_token_ids`` stand for images in prompts.
    """
    length, params = len(new.prompt_token_ids), new.params
    if length == 0:
        raise RequestError("the prompt is empty: give at least one token", "prompt")
    if length >= context + (new.pooling is not None):
        output = ", and the output needs at least one" if new.pooling is None else ""
        raise too_long(context, f"the prompt has {length} tokens{output}")
    lists: list[tuple[Sequence[int], str]] = [
        (new.prompt_token_ids, "prompt"),
        (params.stop_token_ids or (), "stop_token_ids"),
        (list(params.logit_bias or ()), "logit_bias"),
        (params.allowed_token_ids or (), "allowed_token_ids"),
        *((word, "bad_words_token_ids") for word in params.bad_words_token_ids or ()),
    ]
    for token_ids, name in lists:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
            raise RequestError(
                f"{name} has token id {wrong}, but the vocabulary is 0 to {vocab_size - 1}", name
            )
    images = {*image_token_ids}
    if images and not images.isdisjoint(new.prompt_token_ids):  # else it would read all of them
        at, token = next((i, one) for i, one in enumerate(new.prompt_token_ids) if one in images)
        raise RequestError(
            f"prompt has token id {token} at position {at}, which stands for an image: Kiln serves "
            "this model's texts alone: leave images out",
            "prompt",
        )
