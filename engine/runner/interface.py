"""What the core asks of a model runner. It needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kiln.engine.config import SchedulerConfig
from kiln.engine.graphs.counts import GraphCounts
from kiln.engine.kv.host_blocks import HostBlocks
from kiln.engine.lora.loaded_adapter import AdapterStore
from kiln.engine.requests.batch import Batch, StepOutput
from kiln.engine.requests.late_masks import LateMasks
from kiln.engine.requests.pooling import Embedder


class Runner(Protocol):
    """The interface of the model runner: its limits, and one forward pass with sampling.

    Steps are collected in the order in which they were launched, one or two at a time in flight.
    """

    device_type: str  # "cuda" or "cpu"
    max_model_len: int  # tokens, prompt and output
    long_start: int  # requests of more tokens have other rotary frequencies; 0: none has
    num_blocks: int  # of the KV pool
    vocab_size: int  # tokens that the model can draw
    image_token_ids: frozenset[int]  # tokens that stand for images, which no prompt may have
    embedder: Embedder | None  # how it makes embeddings; None: it generates text

    @property
    def limits(self) -> SchedulerConfig | None:
        """The limits of a step, if it has decided any that the configuration leaves open."""

    @property
    def adapter_store(self) -> AdapterStore | None:
        """The LoRA adapters, if the model is built for any."""

    @property
    def host_blocks(self) -> HostBlocks | None:
        """The host memory for KV blocks, if there is any."""

    def graph_counts(self) -> GraphCounts:
        """Return how often each CUDA graph was replayed, and why steps ran without one."""

    def all_reduces(self) -> Mapping[str, int]:
        """Return how often tensors were summed over the ranks, by algorithm."""

    def check_ranks(self) -> None:
        """Raise DeviceError if another rank is gone."""

    def close(self) -> None:
        """End threads, and the processes of other ranks."""

    def launch(self, batch: Batch) -> Any:
        """Start to compute a batch, and to sample a token for each row with ``samples``."""

    def bind(self, launched: Any, masks: LateMasks) -> Any:
        """Start to sample the newest step, which is late. Raises what the step raised."""

    def collect(self, launched: Any) -> StepOutput:
        """Wait for a launched step and return its tokens. Raises what the step raised."""
