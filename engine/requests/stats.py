"""What an engine counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kiln.engine.requests.batch import Batch
from kiln.engine.requests.request import TokenOutput


@dataclass(slots=True)
class StepCounts:
    """The counters that steps advance; see EngineStats."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    steps_not_ahead: int = 0
    missed: int = 0

    def add(self, batch: Batch, outputs: Sequence[TokenOutput]) -> int:
        """Count a step, and return how many tokens its requests got."""
        self.steps += 1
        generated = sum([len(output.token_ids) for output in outputs])
        self.generated_tokens += generated
        if 0 in batch.columns.num_output_tokens:
            answered = {one.request_id for one in outputs if one.token_ids or one.embedding}
            for row in batch.requests:
                if row.num_output_tokens == 0 and row.request_id in answered:
                    self.prompt_tokens += row.num_computed_tokens + row.num_tokens
        return generated


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The current load, and counters since the start."""

    running: int
    waiting: int
    kv_blocks_used: int  # that requests hold
    kv_blocks_cached: int  # that no request holds, and whose contents are kept
    kv_blocks_total: int
    prefix_cache_queries: int  # tokens of prompts that were looked up
    prefix_cache_hits: int  # those of them that needed no computation
    kv_offload_blocks: int  # in host memory
    kv_offload_stored_blocks: int  # that were copied there
    kv_offload_loaded_blocks: int  # that came back
    preemptions: int
    prompt_tokens: int  # of requests whose first token was sampled
    generated_tokens: int
    spec_decode_num_draft_tokens: int
    spec_decode_num_accepted_tokens: int
    spec_decode_steps_without: Mapping[str, int]  # steps without drafts, by reason
    structured_outputs_missed: int  # tokens that waited for the mask of their grammar
    steps: int
    steps_not_ahead: int  # steps that were launched while no other one was in flight
    graphs: int  # that were captured
    graph_bytes: int  # of device memory, of all graphs
    graph_capture_seconds: float
    graph_replays: Mapping[str, int]  # by size of the graph
    graph_fallbacks: Mapping[str, int]  # steps without a graph, by reason
    all_reduces: Mapping[str, int]  # sums over the ranks, by algorithm
    adapter_evictions: int  # from the device
    adapter_running: Mapping[str, int]  # requests by LoRA adapter, and so below
    adapter_waiting: Mapping[str, int]
    adapter_on_device: Mapping[str, int]  # 0 or 1
    adapter_placements: Mapping[str, int]  # copies to the device
    adapter_tokens: Mapping[str, int]  # generated
