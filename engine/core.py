"""The engine core: queues requests, runs steps and returns tokens, in one process."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kiln.engine.config import EngineConfig
from kiln.engine.engine_stats import engine_stats
from kiln.engine.errors import DeviceError, KilnError, RequestError
from kiln.engine.grammar.masks import GrammarMasks
from kiln.engine.kv.block_pool import BlockPool
from kiln.engine.kv.host_tier import HostTier
from kiln.engine.kv.manager import KVManager
from kiln.engine.lora.jobs import AdapterJobs
from kiln.engine.lora.slots import AdapterSlots
from kiln.engine.models.eos import eos_token_ids
from kiln.engine.models.model_folder import find_model_files
from kiln.engine.requests.batch import Batch, StepOutput
from kiln.engine.requests.check import check_task, check_tokens
from kiln.engine.requests.finish import check_some_token
from kiln.engine.requests.in_flight import InFlight
from kiln.engine.requests.late_masks import Bound, MaskSource, Pace, late_masks
from kiln.engine.requests.paced_drafts import FIXED_TOKENS, PacedDrafter
from kiln.engine.requests.request import NewRequest, TokenOutput
from kiln.engine.requests.rerun import failed_alone, run_halves, run_part
from kiln.engine.requests.stats import EngineStats, StepCounts
from kiln.engine.requests.step_log import StepLog
from kiln.engine.runner.interface import Runner
from kiln.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from kiln.engine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_RAN_AGAIN = "it failed, and its requests ran again"
_PATIENT = 60.0  # seconds for masks of requests of a failed step, which run alone

Progress = Callable[[str, int, int], None]  # stage, done, total


class EngineCore:
    """A model and its scheduler; not thread-safe.

    ``vocabulary`` returns the model's vocabulary for grammars, if it was read already. ``masks``
    limits what requests may draw, ``runner`` and ``eos`` replace the model of ``config``, all three
    in tests.
    Raises ConfigError or ModelError when the model cannot be served.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        vocabulary: Callable[[], Any] | None = None,
        masks: MaskSource | None = None,
        runner: Runner | None = None,
        eos: frozenset[int] | None = None,
    ) -> None:
        self.runner: Runner = load_runner(config, progress) if runner is None else runner
        limits = self.runner.limits or config.scheduler.for_device(self.runner.device_type)
        self.config = replace(config, scheduler=limits)
        vocab_size, forces = self.runner.vocab_size, config.speculative.method is not None
        if eos is None:
            eos = eos_token_ids(find_model_files(config.model), vocab_size)
        read = vocabulary or partial(_vocabulary, config)
        self.grammars = GrammarMasks(read, vocab_size, eos, forces=forces)
        self._masks: MaskSource = masks or self.grammars
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
            masks=self._masks,
            long_start=self.runner.long_start,
        )
        self._drafter = None
        if config.speculative.method is not None:
            fixed = FIXED_TOKENS[self.runner.device_type]
            self._drafter = PacedDrafter(config.speculative.num_speculative_tokens, fixed)
        self.scheduler.drafter = self._drafter
        self.adapters = AdapterJobs(slots, config.lora)
        self._overlaps = config.scheduler.overlap
        self._in_flight: deque[InFlight] = deque()  # oldest first
        self._pace = Pace()
        self._is_changing = False  # or a change was interrupted, and the state is not consistent
        self._counts = StepCounts()
        self.step_log = StepLog()

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
        check_task(new, self.runner.embedder)
        limits = (self.runner.max_model_len, self.runner.vocab_size)
        check_tokens(new, *limits, self.runner.image_token_ids)
        check_some_token(new, self.scheduler.eos_token_ids, self.runner.vocab_size)
        self.scheduler.check(new)

    def add(self, new: NewRequest) -> None:
        """Queue a request. Raises RequestError, or QueueFullError if the queue is full."""
        self.check(new)
        with self._changing():
            is_late = self._masks.begin(new)
            try:
                self.scheduler.add(new, is_late=is_late)
            except RequestError:
                self._masks.end(new.request_id)
                raise

    def abort(self, request_id: str) -> None:
        """Drop a request at once and free its blocks. An unknown id is ignored."""
        with self._changing():
            self.scheduler.abort(request_id)
            self._masks.end(request_id)

    def clear(self) -> None:
        """Drop every request at once and free its blocks."""
        with self._changing():
            for request_id in self.scheduler.requests:
                self._masks.end(request_id)
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
        self.grammars.close()

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
            # All requests may be waiting for an adapter, a mask, or blocks that are being copied.
            self.scheduler.adapters.collect(wait=True)
            self.scheduler.kv.collect(wait=True)
            self._masks.wait()
        for failed in self.scheduler.adapters.fail_waiting(self.scheduler.waiting):
            self.scheduler.abort(failed.request_id)
            self._masks.end(failed.request_id)
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
        self._counts.steps_not_ahead += not self._in_flight
        begun = time.monotonic()
        try:
            launched = self.runner.launch(batch)
            self._in_flight.append(InFlight(batch, begun, launched))
        except DeviceError:
            raise
        except Exception as error:
            self._in_flight.append(InFlight(batch, begun, error=error))
            return False
        return True

    def _bound(self, step: InFlight) -> InFlight:
        """Launch the sampling of a late step; all steps before it are committed."""
        if not step.batch.is_late or step.bound or step.error:
            return step
        bound = self._masks_of(step.batch, self._pace.patience)
        if bound.missed:
            self._counts.missed += len(bound.missed)
            self.scheduler.steps.of(step.batch).drop(bound.missed)
        try:
            launched = self.runner.bind(step.launched, bound.masks)
        except DeviceError:
            raise
        except Exception as error:
            return InFlight(step.batch, step.begun, error=error)
        return replace(step, launched=launched, bound=bound)

    def _masks_of(self, batch: Batch, patience: float) -> Bound:
        return late_masks(self._masks, batch, self.scheduler.requests, patience)

    def _finish_step(self) -> list[TokenOutput]:
        """Wait for the oldest step in flight and return its outputs."""
        step = self._bound(self._in_flight[0])
        asked = time.monotonic()
        found = self._output_of(step)
        times = (step.begun, asked, time.monotonic())
        outputs = self.scheduler.commit(step.batch, found)
        self._in_flight.popleft()
        self._pace.tick()
        if step.batch.is_late:
            for output in outputs:
                if output.finish_reason is not None:
                    self._masks.end(output.request_id)
        generated = self._counts.add(step.batch, outputs)
        self.step_log.add(self._counts.steps, step.batch, found, generated, times)
        return outputs

    def _output_of(self, step: InFlight) -> StepOutput:
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
            rows = self.scheduler.steps.of(step.batch).still_valid(self.scheduler.requests).requests
            # What is left of the step may be innocent: a request that has ended since made it fail.
            others = len(rows) < len(step.batch.requests)
            failed = () if others else failed_alone(rows, error)
        # Outside the handler: the error keeps the memory of the failed step alive.
        if others and rows:
            return StepOutput(run_part(self._run, rows), why_eager=_RAN_AGAIN)
        return StepOutput(failed or run_halves(self._run, rows), why_eager=_RAN_AGAIN)

    def _drop_steps_behind(self) -> None:
        while len(self._in_flight) > 1:
            step = self._in_flight.pop()
            self.scheduler.steps.pop().take_back()
            if step.error is None:
                try:
                    self.runner.collect(step.launched)
                except DeviceError:
                    raise
                except Exception as error:
                    logger.warning("a step behind a failed one failed too: %r", error)

    def _run(self, batch: Batch) -> StepOutput:
        step = InFlight(batch, 0, self.runner.launch(batch))
        if batch.is_late:
            bound = self._masks_of(batch, _PATIENT)
            step = replace(step, launched=self.runner.bind(step.launched, bound.masks), bound=bound)
        return self._collect(step)

    def _collect(self, step: InFlight) -> StepOutput:
        """Wait for the tokens of a step. Raises what it raised."""
        if step.error is not None:
            raise step.error
        output = self.runner.collect(step.launched)
        if step.bound is None:
            return output
        return output._replace(tokens=step.bound.applied(output.tokens))

    def stats(self) -> EngineStats:
        """Return the current load and the totals."""
        return engine_stats(self.scheduler, self.runner, self._drafter, self._counts)


def load_runner(
    config: EngineConfig,
    progress: Progress | None,
    on_lost: Callable[[KilnError], None] | None = None,
) -> ModelRunner:
    """Return the runner of a config, ready for requests; see ``kiln.engine.runner.load``."""
    # Imported here so that the rest of the core can be used and tested without torch.
    from kiln.engine.runner import load

    return load.load_runner(config, progress, on_lost)


def _vocabulary(config: EngineConfig) -> Any:
    # Imported here: without grammars this process needs no tokenizer.
    from kiln.engine.text.vocabulary import vocabulary_of

    return vocabulary_of(config.model)
