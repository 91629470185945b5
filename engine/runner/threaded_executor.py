"""Run steps in a thread of their own, on a CPU."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from kiln.engine.requests.batch import Batch, StepOutput
from kiln.engine.requests.late_masks import LateMasks
from kiln.engine.runner.executor import Executor, PendingStep


class ThreadedExecutor:
    """An executor whose steps run in a thread, so that the caller schedules meanwhile."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="kiln-step")

    def launch(self, batch: Batch) -> Future[PendingStep]:
        """Queue a step behind those that were launched before."""
        return self.thread.submit(self._executor.launch, batch)

    def bind(self, step: Future[PendingStep], masks: LateMasks) -> Future[PendingStep]:
        """Queue the sampling of a late step behind its forward pass."""
        return self.thread.submit(lambda: self._executor.bind(step.result(), masks))

    def collect(self, step: Future[PendingStep]) -> StepOutput:
        """Wait for a step and return its tokens. Raises what the step raised."""
        return self._executor.collect(step.result())

    def close(self, *, wait: bool) -> None:
        """End the thread behind the steps that were launched."""
        self.thread.shutdown(wait=wait)
