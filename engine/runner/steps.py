"""One step after another on the device: inputs, forward pass, sampling, results."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from kiln.engine.attention.context import AttentionStep, StepLayer, attention_step
from kiln.engine.attention.paged_layer import Attention
from kiln.engine.models.family import Model
from kiln.engine.requests.batch import Batch, ScheduledRequest, StepOutput
from kiln.engine.runner.failures import explained
from kiln.engine.runner.inputs import ForwardInputs, StepInputs
from kiln.engine.runner.sampler import HostCopies, PendingSamples, sample


class PendingStep(NamedTuple):
    """A launched step. ``samples`` is None if no request samples."""

    description: str
    sampling: Sequence[ScheduledRequest]
    samples: PendingSamples | None


class Steps:
    """Runs the steps of a model on one KV pool, to which ``layers`` are bound."""

    def __init__(
        self,
        model: Model,
        attention: Attention,
        layers: Sequence[StepLayer],
        inputs: StepInputs,
        copies: HostCopies,
    ) -> None:
        self._model = model
        self._attention = attention
        self._layers = layers
        self._inputs = inputs
        self._copies = copies

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step on the current stream; on a CPU, run it.

        Raises DeviceError if the device is lost, ConfigError if memory ran out.
        """
        device = self._inputs.sampled.device
        about = f"a step of {batch.num_tokens} tokens in {len(batch.requests)} requests"
        with explained(device, about):
            self._inputs.send(batch)
            inputs = self._inputs.make(batch)
            sampling = [request for request in batch.requests if request.samples]
            hidden = self._forward(inputs)
            if not sampling:
                return PendingStep(about, (), None)
            logits = self._model.logits(hidden.index_select(0, inputs.sample_rows))
            samples = sample(logits, inputs, sampling)
            self._inputs.sampled[: len(sampling)].copy_(samples.tokens)
            return PendingStep(about, sampling, self._copies.begin(samples))

    def collect(self, step: PendingStep) -> StepOutput:
        """Wait for a step and return its tokens. Raises DeviceError if the device is lost."""
        if step.samples is None:
            return StepOutput(())
        with explained(self._inputs.sampled.device, step.description):
            return StepOutput(step.samples.wait(step.sampling))

    def _forward(self, inputs: ForwardInputs) -> torch.Tensor:
        plan = self._attention.plan(inputs.metadata)
        with attention_step(AttentionStep(self._layers, inputs.metadata, plan)):
            return self._model.forward(inputs.token_ids, inputs.positions)


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
