"""The fields of a response that repeat the request, with the values that were used."""

from __future__ import annotations

from typing import Any

from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.server.responses_api.body import ResponsesRequest


def echoed(body: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """Return what a response repeats of its request. It says that nothing is kept."""
    effort = None if body.reasoning is None else body.reasoning.effort
    verbosity = None if body.text is None else body.text.verbosity
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, "verbosity": verbosity or "medium"},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _tool(tool: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
