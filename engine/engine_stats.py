"""What an engine counts, gathered from its parts."""

from __future__ import annotations

from kiln.engine.requests.paced_drafts import PacedDrafter
from kiln.engine.requests.stats import EngineStats, StepCounts
from kiln.engine.runner.interface import Runner
from kiln.engine.scheduler import Scheduler


def engine_stats(
    scheduler: Scheduler, runner: Runner, drafter: PacedDrafter | None, counts: StepCounts
) -> EngineStats:
    """Return the current load and the totals."""
    graphs, slots, tier = runner.graph_counts(), scheduler.adapters, scheduler.kv.tier
    return EngineStats(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        kv_blocks_used=scheduler.kv.pool.num_held,
        kv_blocks_cached=scheduler.kv.pool.num_idle,
        kv_blocks_total=scheduler.kv.pool.num_blocks,
        prefix_cache_queries=scheduler.kv.num_queried,
        prefix_cache_hits=scheduler.kv.num_hit,
        kv_offload_blocks=0 if tier is None else tier.num_used,
        kv_offload_stored_blocks=0 if tier is None else tier.num_stored,
        kv_offload_loaded_blocks=0 if tier is None else tier.num_loaded,
        preemptions=scheduler.num_preemptions,
        prompt_tokens=counts.prompt_tokens,
        generated_tokens=counts.generated_tokens,
        spec_decode_num_draft_tokens=0 if drafter is None else drafter.num_drafts,
        spec_decode_num_accepted_tokens=0 if drafter is None else drafter.num_accepted,
        spec_decode_steps_without={} if drafter is None else dict(drafter.steps_without),
        structured_outputs_missed=counts.missed,
        steps=counts.steps,
        steps_not_ahead=counts.steps_not_ahead,
        graphs=graphs.captured,
        graph_bytes=graphs.num_bytes,
        graph_capture_seconds=graphs.seconds,
        graph_replays=dict(graphs.replays),
        graph_fallbacks=dict(graphs.fallbacks),
        all_reduces=dict(runner.all_reduces()),
        adapter_evictions=slots.num_evictions,
        adapter_running={one.name: one.running for one in slots.loaded},
        adapter_waiting={one.name: one.requests - one.running for one in slots.loaded},
        adapter_on_device={one.name: int(one.ready) for one in slots.loaded},
        adapter_placements={one.name: one.placements for one in slots.loaded},
        adapter_tokens={one.name: one.tokens for one in slots.loaded},
    )
