"""One step after another on the device: inputs, forward pass, sampling, results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from kiln.engine.distributed.group import Group
from kiln.engine.errors import DeviceError
from kiln.engine.graphs.runner import GraphKey
from kiln.engine.lora.runtime import Adapters
from kiln.engine.requests.batch import Batch, ScheduledRequest, StepOutput
from kiln.engine.runner.failures import explained
from kiln.engine.runner.forward import ModelStep
from kiln.engine.runner.sampler import HostCopies, PendingSamples, sample
from kiln.engine.runner.step_frame import StepFrame
from kiln.engine.runner.step_graphs import StepGraphs
from kiln.jit_kernels.ops.sampling.functions import Samples, sample_tokens


class PendingStep(NamedTuple):
    """A launched step. ``samples`` is None if no request samples."""

    description: str
    sampling: Sequence[ScheduledRequest]
    samples: PendingSamples | None


class Steps:
    """Runs the steps of a model, as graphs where there are any.

    ``announce``, if it is set, gets every step before rank 0 runs it, for the other ranks.
    """

    def __init__(
        self,
        step: ModelStep,
        graphs: StepGraphs,
        copies: HostCopies,
        group: Group,
        adapters: Adapters | None = None,
    ) -> None:
        self._step = step
        self._graphs = graphs
        self._copies = copies
        self._group = group
        self._adapters = adapters
        self.announce: Callable[[StepFrame], None] | None = None
        self._interrupted = ""  # the step that the other ranks ran and this one did not

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step on the current stream; on a CPU, run it.

        Raises DeviceError if the device is lost, ConfigError if memory ran out.
        """
        about = f"a step of {batch.num_tokens} tokens in {len(batch.requests)} requests"
        if self._interrupted:
            raise DeviceError(
                f"rank 0 of {self._group.size} was interrupted in {self._interrupted}, which the "
                "other ranks run: start Kiln again"
            )
        with explained(self._step.device, about):
            key = self._choose_graph(batch)
            words = self._step.inputs.send(batch)
            if self.announce is None:
                return self._launch(batch, key, about)
            self.announce(StepFrame(batch, key, words))
        try:
            with explained(self._step.device, about):
                return self._launch(batch, key, about)
        except Exception as error:  # the other ranks wait for the sums of this one
            raise DeviceError(
                f"rank 0 of {self._group.size} failed in {about}, which the other ranks run too: "
                f"{error or repr(error)}; an engine needs all its ranks: start Kiln again"
            ) from error
        except BaseException:
            self._interrupted = about
            raise

    @torch.inference_mode()
    def follow(self, frame: StepFrame) -> None:
        """Queue a step that rank 0 has announced. Raises what ``launch`` raises."""
        about = f"a step of {frame.batch.num_tokens} tokens"
        with explained(self._step.device, about):
            self._step.inputs.send_message(frame.words)
            self._launch(frame.batch, frame.key, about)

    def collect(self, step: PendingStep) -> StepOutput:
        """Wait for a step and return its tokens. Raises DeviceError if the device is lost."""
        if step.samples is None:
            return StepOutput(())
        with explained(self._step.device, step.description):
            return StepOutput(step.samples.wait(step.sampling))

    def _launch(self, batch: Batch, key: GraphKey | None, about: str) -> PendingStep:
        """Run the step of the message that was sent last."""
        sampling: Sequence[ScheduledRequest] = batch.requests
        if not all(batch.columns.samples):
            sampling = [request for request in batch.requests if request.samples]
        samples = self._run(batch, sampling) if key is None else self._replay(key, batch, sampling)
        if samples is None or self._group.rank > 0:
            return PendingStep(about, sampling, None)
        return PendingStep(about, sampling, self._copies.begin(samples))

    def _choose_graph(self, batch: Batch) -> GraphKey | None:
        """Return the graph that a batch runs in; None, and the reason is counted, if in none."""
        graphs = self._graphs.runner
        if graphs is None or not graphs.is_ready:
            return None
        reason = self._graphs.can_run(batch)
        if reason:
            graphs.counts.fallbacks[reason] += 1
            return None
        return graphs.replay_prepare(batch)

    def _replay(
        self, key: GraphKey, batch: Batch, sampling: Sequence[ScheduledRequest]
    ) -> Samples | None:
        used = len(sampling)
        logits = self._graphs.replay(key, batch, used)
        if not sampling:
            return None
        if batch.is_plain:
            return self._step.samples(key.rows)
        return self._sample(logits[:used], sampling)  # once more, behind the graph

    def _run(self, batch: Batch, sampling: Sequence[ScheduledRequest]) -> Samples | None:
        if self._adapters is None:
            return self._run_layers(batch, sampling)
        with self._adapters.step(batch):
            return self._run_layers(batch, sampling)

    def _run_layers(self, batch: Batch, sampling: Sequence[ScheduledRequest]) -> Samples | None:
        inputs = self._step.inputs.make(batch)
        hidden = self._step.hidden(inputs)
        if not sampling:
            return None
        logits = self._step.model.logits(hidden.index_select(0, inputs.sample_rows))
        return self._sample(logits, sampling)

    def _sample(self, logits: torch.Tensor, sampling: Sequence[ScheduledRequest]) -> Samples | None:
        """Sample on every rank alike; where a request edits its logits, on rank 0 for all."""
        rows = len(sampling)
        settings, keys = self._step.inputs.sampling(rows)
        if all(request.is_plain for request in sampling):
            return sample_tokens(logits, settings, keys, out=self._step.samples(rows))
        own, samples = self._step.inputs.sampled[:rows], None
        if self._group.rank == 0:
            samples = sample(logits, settings, keys, sampling)
            own.copy_(samples.tokens)
        self._group.broadcast(own)
        return samples


class ThreadedSteps:
    """The same on a CPU, in a thread: the caller schedules while the step runs."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kiln-step")

    def launch(self, batch: Batch) -> Future[PendingStep]:
        """Queue a step behind those that were launched before."""
        return self._thread.submit(self._steps.launch, batch)

    def collect(self, step: Future[PendingStep]) -> StepOutput:
        """Wait for a step and return its tokens. Raises what the step raised."""
        return self._steps.collect(step.result())
