"""The engine core: queues requests, runs steps and returns tokens, in one process."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kiln.engine.config import EngineConfig
from kiln.engine.errors import DeviceError, KilnError, RequestError
from kiln.engine.kv.block_pool import BlockPool
from kiln.engine.kv.host_tier import HostTier
from kiln.engine.kv.manager import KVManager
from kiln.engine.lora.jobs import AdapterJobs
from kiln.engine.lora.slots import AdapterSlots
from kiln.engine.models.model_folder import eos_token_ids, resolve_model_folder
from kiln.engine.requests.batch import Batch, SampledTokens, StepOutput
from kiln.engine.requests.check import check_tokens
from kiln.engine.requests.finish import check_some_token
from kiln.engine.requests.late_masks import MaskSource, late_masks
from kiln.engine.requests.paced_drafts import FIXED_TOKENS, PacedDrafter
from kiln.engine.requests.request import NewRequest, TokenOutput
from kiln.engine.requests.rerun import failed_alone, run_halves, run_part
from kiln.engine.requests.stats import EngineStats
from kiln.engine.runner.interface import Runner
from kiln.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from kiln.engine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step: what the runner returned, or the error that it raised.

    ``is_bound``: whether its sampling is launched too, which a late step does later. ``failed``:
    the outputs of requests whose mask could not be made.
    """

    batch: Batch
    launched: Any = None
    error: Exception | None = None
    failed: Mapping[str, SampledTokens] = field(default_factory=dict)
    is_bound: bool = True


class EngineCore:
    """A model and its scheduler; not thread-safe.

    ``mask_source`` limits what requests may draw. ``runner`` and ``eos`` replace the model of
    ``config`` in tests.
    Raises ConfigError or ModelError when the model cannot be served.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        mask_source: MaskSource | None = None,
        runner: Runner | None = None,
        eos: frozenset[int] | None = None,
    ) -> None:
        self._mask_source = mask_source
        self.runner: Runner = load_runner(config, progress) if runner is None else runner
        limits = self.runner.limits or config.scheduler.for_device(self.runner.device_type)
        self.config = replace(config, scheduler=limits)
        if eos is None:
            eos = eos_token_ids(resolve_model_folder(config.model.model))
        slots, host = AdapterSlots(self.runner.adapter_store), self.runner.host_blocks
        pool = BlockPool(self.runner.num_blocks, 0 if host is None else host.num_slots)
        self.scheduler = Scheduler(
            limits,
            KVManager(
                pool,
                config.kv.block_size,
                caching=config.kv.enable_prefix_caching,
                tier=None if host is None else HostTier(host, pool),
            ),
            max_model_len=self.runner.max_model_len,
            eos_token_ids=eos,
            adapters=slots,
            seed=config.model.seed,
        )
        self._drafter = None
        if config.speculative.method is not None:
            fixed = FIXED_TOKENS[self.runner.device_type]
            self._drafter = PacedDrafter(config.speculative.num_speculative_tokens, fixed)
        self.scheduler.drafter = self._drafter
        self.adapters = AdapterJobs(slots, config.lora)
        self._overlaps = config.scheduler.overlap
        self._in_flight: deque[InFlight] = deque()  # oldest first
        self._is_changing = False  # or a change was interrupted, and the state is not consistent
        self._steps = 0
        self._steps_not_ahead = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus output, in tokens."""
        return self.runner.max_model_len

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs, or a step or a load from the host is in flight."""
        return bool(self._in_flight) or self.scheduler.has_work or self.scheduler.kv.is_loading

    def check(self, new: NewRequest) -> None:
        """Reject a request that can never be served. Raises RequestError."""
        check_tokens(new, self.runner.max_model_len, self.runner.vocab_size)
        check_some_token(new, self.scheduler.eos_token_ids, self.runner.vocab_size)
        self.scheduler.check(new)

    def add(self, new: NewRequest) -> None:
        """Queue a request. Raises RequestError, or QueueFullError if the queue is full."""
        self.check(new)
        is_late = self._mask_source is not None and self._mask_source.limits(new)
        with self._changing():
            self.scheduler.add(new, is_late=is_late)

    def abort(self, request_id: str) -> None:
        """Drop a request at once and free its blocks. An unknown id is ignored."""
        with self._changing():
            self.scheduler.abort(request_id)

    def clear(self) -> None:
        """Drop every request at once and free its blocks."""
        with self._changing():
            self.scheduler.clear()
            self.scheduler.kv.give_way()
            self._in_flight.clear()

    def reset_prefix_cache(self) -> None:
        """Forget what KV blocks hold; requests keep the blocks that they have."""
        with self._changing():
            self.scheduler.kv.forget_prefixes()

    def check_ranks(self) -> None:
        """Raise DeviceError if another rank is gone; ``step`` does so too."""
        self.runner.check_ranks()

    def close(self) -> None:
        """End threads and other ranks; no step may follow. Memory is freed with the core."""
        self.runner.close()

    def step(self) -> list[TokenOutput]:
        """Launch the next step, then return the outputs of the one before, ended requests included.

        So the device computes one step while the host handles the tokens of another. Without
        overlap the outputs are those of the step that was launched.

        A request that makes the runner raise finishes with reason "error"; the others get their
        tokens. Raises DeviceError if the device fails permanently.
        """
        with self._changing():
            return self._step()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Surround a change of the scheduler's state, which Ctrl-C may interrupt at any line.

        The next change then begins with a consistent state: all requests wait, as if preempted,
        and the steps in flight are dropped. It also does so if its own beginning is interrupted.
        """
        if self._is_changing:
            self._in_flight.clear()
            self.scheduler.rebuild()
        self._is_changing = True
        try:
            yield
        except RequestError:  # refused before anything was changed
            self._is_changing = False
            raise
        self._is_changing = False

    def _step(self) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        self.scheduler.kv.collect()
        runs = self._launch(self.scheduler.schedule())
        if not runs and not self._in_flight:
            # Perhaps all waiting requests wait for an adapter or for blocks that are being copied.
            self.scheduler.adapters.collect(wait=True)
            self.scheduler.kv.collect(wait=True)
        for failed in self.scheduler.adapters.fail_waiting(self.scheduler.waiting):
            self.scheduler.abort(failed.request_id)
            outputs.append(failed)
        while len(self._in_flight) > (1 if runs and self._overlaps else 0):
            outputs += self._finish_step()
        if self._in_flight:  # all steps before it are committed now
            self._in_flight[0] = self._bound(self._in_flight[0])
        return outputs

    def _launch(self, batch: Batch) -> bool:
        """Launch a batch; return False if it is empty or its launch failed."""
        if not batch.requests:
            return False
        self._steps_not_ahead += not self._in_flight
        try:
            launched = self.runner.launch(batch)
            self._in_flight.append(InFlight(batch, launched, is_bound=not batch.is_late))
        except DeviceError:
            raise
        except Exception as error:
            self._in_flight.append(InFlight(batch, error=error))
            return False
        return True

    def _bound(self, step: InFlight) -> InFlight:
        """Launch the sampling of a late step; all steps before it are committed."""
        if step.is_bound or self._mask_source is None:
            return step
        masks, failed = late_masks(self._mask_source, step.batch, self.scheduler.requests)
        try:
            launched = self.runner.bind(step.launched, masks)
        except DeviceError:
            raise
        except Exception as error:
            return InFlight(step.batch, error=error)
        return replace(step, launched=launched, failed=failed, is_bound=True)

    def _finish_step(self) -> list[TokenOutput]:
        """Wait for the oldest step in flight and return its outputs."""
        step = self._bound(self._in_flight[0])
        outputs = self.scheduler.commit(step.batch, StepOutput(self._tokens_of(step)))
        self._in_flight.popleft()
        self._count(step.batch, outputs)
        return outputs

    def _tokens_of(self, step: InFlight) -> tuple[SampledTokens, ...]:
        """Return the tokens of a step; if it raised, run its requests again, without the culprits.

        A step that was launched behind the failed one has read tokens that do not exist: it is
        dropped, and its requests are scheduled again.
        """
        try:
            return self._collect(step)
        except DeviceError:
            raise
        except Exception as error:
            self._drop_steps_behind()
            rows = self.scheduler.still_valid(step.batch).requests
            # What is left of the step may be innocent: a request that has ended since made it fail.
            others = len(rows) < len(step.batch.requests)
            failed = () if others else failed_alone(rows, error)
        # Outside the handler: the error keeps the memory of the failed step alive.
        if others and rows:
            return run_part(self._run, rows)
        return failed or run_halves(self._run, rows)

    def _drop_steps_behind(self) -> None:
        while len(self._in_flight) > 1:
            step = self._in_flight.pop()
            self.scheduler.take_back()
            if step.error is None:
                try:
                    self.runner.collect(step.launched)
                except DeviceError:
                    raise
                except Exception as error:
                    logger.warning("a step behind a failed one failed too: %r", error)

    def _run(self, batch: Batch) -> StepOutput:
        step = InFlight(batch, self.runner.launch(batch), is_bound=not batch.is_late)
        return StepOutput(self._collect(self._bound(step)))

    def _collect(self, step: InFlight) -> tuple[SampledTokens, ...]:
        """Wait for the tokens of a step. Raises what it raised."""
        if step.error is not None:
            raise step.error
        tokens = self.runner.collect(step.launched).tokens
        if not step.failed:
            return tokens
        return tuple(step.failed.get(one.request_id, one) for one in tokens)

    def stats(self) -> EngineStats:
        """Return the current load and the totals."""
        scheduler, graphs, drafter = self.scheduler, self.runner.graph_counts(), self._drafter
        slots, tier = scheduler.adapters, scheduler.kv.tier
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
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            spec_decode_num_draft_tokens=0 if drafter is None else drafter.num_drafts,
            spec_decode_num_accepted_tokens=0 if drafter is None else drafter.num_accepted,
            spec_decode_steps_without={} if drafter is None else dict(drafter.steps_without),
            steps=self._steps,
            steps_not_ahead=self._steps_not_ahead,
            graphs=graphs.captured,
            graph_bytes=graphs.num_bytes,
            graph_capture_seconds=graphs.seconds,
            graph_replays=dict(graphs.replays),
            graph_fallbacks=dict(graphs.fallbacks),
            all_reduces=dict(self.runner.all_reduces()),
            adapter_evictions=slots.num_evictions,
            adapter_running={one.name: one.running for one in slots.loaded},
            adapter_waiting={one.name: one.requests - one.running for one in slots.loaded},
            adapter_on_device={one.name: int(one.ready) for one in slots.loaded},
            adapter_placements={one.name: one.placements for one in slots.loaded},
            adapter_tokens={one.name: one.tokens for one in slots.loaded},
        )

    def _count(self, batch: Batch, outputs: list[TokenOutput]) -> None:
        self._steps += 1
        self._generated_tokens += sum(len(output.token_ids) for output in outputs)
        if 0 not in batch.columns.num_output_tokens:
            return
        answered = {output.request_id for output in outputs if output.token_ids}
        for row in batch.requests:
            if row.num_output_tokens == 0 and row.request_id in answered:
                self._prompt_tokens += row.num_computed_tokens + row.num_tokens


def load_runner(
    config: EngineConfig,
    progress: Progress | None,
    on_lost: Callable[[KilnError], None] | None = None,
) -> ModelRunner:
    """Return the runner of a config, ready for requests; see ``kiln.engine.runner.load``."""
    # Imported here so that the rest of the core can be used and tested without torch.
    from kiln.engine.runner import load

    return load.load_runner(config, progress, on_lost)
