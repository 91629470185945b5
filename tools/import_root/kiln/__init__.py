"""Kiln: an LLM inference engine that compiles its own kernels.

The public names load on first use, so that ``import kiln`` costs milliseconds and no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kiln.engine.llm import LLM
    from kiln.engine.requests.pooling import EmbeddingRequestOutput, PoolingParams
    from kiln.engine.requests.request import RequestOutput
    from kiln.engine.requests.sampling_params import SamplingParams
    from kiln.engine.requests.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "EmbeddingRequestOutput",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "LLM": "kiln.engine.llm",
    "EmbeddingRequestOutput": "kiln.engine.requests.pooling",
    "PoolingParams": "kiln.engine.requests.pooling",
    "RequestOutput": "kiln.engine.requests.request",
    "SamplingParams": "kiln.engine.requests.sampling_params",
    "StructuredOutputsParams": "kiln.engine.requests.structured_outputs",
}

# In a checkout the four folders are at the repository's root; the links beside this file are only
# for builds and static tools. Searching the root first gives tracebacks the real paths.
_ROOT = Path(__file__).resolve().parents[3]
if (_ROOT / "kernel_sources").is_dir() and (_ROOT / "tools" / "import_root").is_dir():
    __path__.insert(0, str(_ROOT))


def __getattr__(name: str) -> object:
    """Import the module of a public name. Raises AttributeError on any other name."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kiln' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
