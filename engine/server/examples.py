"""A body of each route that takes one, for the OpenAPI document and ``/docs``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
EXAMPLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "ChatCompletionRequest": {"messages": _QUESTION, "max_tokens": 64, "stream": True},
        "CompletionRequest": {"prompt": "Once upon a time", "max_tokens": 32},
        "ResponsesRequest": {"input": "What is 17 + 25?", "max_output_tokens": 64},
        "MessagesRequest": {"messages": _QUESTION, "max_tokens": 64},
        "CountTokensRequest": {"messages": _QUESTION},
        "EmbeddingsRequest": {"input": ["Once upon a time"]},
        "TokenizeRequest": {"prompt": "Once upon a time"},
        "DetokenizeRequest": {"tokens": [5, 6, 7]},
        "LoadAdapterRequest": {"lora_name": "sql", "lora_path": "/adapters/sql"},
        "UnloadAdapterRequest": {"lora_name": "sql"},
    }
)
