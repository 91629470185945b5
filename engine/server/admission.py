"""Turn an HTTP request into validated engine requests, or an error; sends nothing to the engine."""

from __future__ import annotations

import sys

from starlette.requests import Request

from kiln.engine.errors import RequestError, too_long
from kiln.engine.requests.check import ONLY_EMBEDDINGS
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.server.body import Body, read_body
from kiln.engine.server.disconnect import unless_gone
from kiln.engine.server.errors import ApiError
from kiln.engine.server.fields import MAX_PROMPTS
from kiln.engine.server.generation import Generation
from kiln.engine.server.protocol import GenerationRequest
from kiln.engine.server.serving import Serving
from kiln.engine.text.prompts import Prompt, truncated

MAX_ANSWERS = MAX_PROMPTS  # prompts × n


async def read_request(serving: Serving, request: Request, model: type[Body]) -> Body:
    """Read a body; the server's settings say whether unknown fields are refused."""
    lenient = serving.settings.ignore_unknown_fields
    return await read_body(request, model, serving.threads, ignore_unknown=lenient)


async def admit(serving: Serving, request: Request, body: GenerationRequest) -> Generation:
    """Check a body and tokenize its prompts.

    Raises ApiError or RequestError for an invalid body, the name of a model that is not served, a
    prompt that is too long, or a grammar that cannot be used; and ClientDisconnect.
    """
    info = serving.require_ready()
    served, context = serving.require_model(body.model), info.max_model_len
    if info.embedder is not None:
        raise RequestError(ONLY_EMBEDDINGS, "model")
    params = body.sampling_params(serving.settings.defaults)
    longest = context if params.truncate_prompt_tokens is None else sys.maxsize

    def begin() -> Generation:
        prompts = body.read_prompts(serving.tokenizer, longest)
        prompts = [truncated(prompt, params, context) for prompt in prompts]
        _check(serving, body, prompts, params)
        try:
            return Generation(serving, served, body, prompts, params)
        except RequestError as error:  # of a grammar, or of bad words
            raise body.with_own_name(error) from error

    generation = await serving.threads.run_for(request, begin)
    if generation.grammar is not None:
        await unless_gone(request.receive, generation.check_grammar(generation.grammar))
    return generation


def _check(
    serving: Serving, body: GenerationRequest, prompts: list[Prompt], params: SamplingParams
) -> None:
    """Reject requests that can never run. Raises ApiError 400, and ContextLengthError."""
    if len(prompts) * params.n > MAX_ANSWERS:
        message = f"prompt: {len(prompts)} prompts with n {params.n}: at most {MAX_ANSWERS} answers"
        raise ApiError(400, message, "prompt")
    info = serving.require_ready()
    if params.stop_strings and serving.tokenizer is None:
        raise ApiError(400, "stop: the model has no tokenizer; use stop_token_ids", "stop")
    for number, prompt in enumerate(prompts):
        _check_length(body, len(prompt.token_ids), info.max_model_len, number)


def _check_length(body: GenerationRequest, length: int, context: int, number: int) -> None:
    has = f"the {body.prompt_field} {'have' if body.prompt_field.endswith('s') else 'has'}"
    has = f"prompt {number} has" if number else has
    if length >= context:
        problem = f"{has} {length} tokens, and the answer needs at least one: shorten it"
        raise too_long(context, problem, body.prompt_field)
    # Reject only a requested max_tokens; reduce a default to what is left.
    max_tokens = body.asked_max_tokens
    if max_tokens is not None and max_tokens > context - length:
        name = body.own_names.get("max_tokens", "max_tokens")
        problem = (
            f"{has} {length} tokens and {name} is {max_tokens}, {length + max_tokens} in "
            f"all: at most {context - length} are left for the answer"
        )
        raise too_long(context, problem, name)
