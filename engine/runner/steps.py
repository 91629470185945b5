"""One step after another on the device: inputs, forward pass, sampling, results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from kiln.engine.distributed.group import Group
from kiln.engine.errors import DeviceError
from kiln.engine.graphs.runner import GraphKey
from kiln.engine.lora.runtime import Adapters
from kiln.engine.requests.batch import Batch, SampledTokens, ScheduledRequest, StepOutput
from kiln.engine.runner.failures import explained
from kiln.engine.runner.forward import ModelStep
from kiln.engine.runner.masks import Masks
from kiln.engine.runner.prompt_logprobs import PendingPrompts, report_prompts
from kiln.engine.runner.sample_alone import Sampled, sample_or_fail_alone
from kiln.engine.runner.sampler import HostCopies, PendingSamples, sample
from kiln.engine.runner.step_frame import StepFrame
from kiln.engine.runner.step_graphs import StepGraphs
from kiln.jit_kernels.ops.sampling.functions import sample_tokens


class PendingStep(NamedTuple):
    """A launched step. ``samples`` is None if no request samples; ``failed`` as of Sampled.

    ``prompts`` is None if no request reports its prompt.
    """

    description: str
    sampling: Sequence[ScheduledRequest]
    samples: PendingSamples | None
    failed: Mapping[str, SampledTokens]
    prompts: PendingPrompts | None = None


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
        self._masks = Masks(step.inputs.history)
        self.announce: Callable[[StepFrame], None] | None = None
        self._lost = ""  # why the other ranks are not where this one is

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step on the current stream; on a CPU, run it.

        Raises DeviceError if the device is lost, ConfigError if memory ran out.
        """
        about = f"a step of {batch.num_tokens} tokens in {len(batch.requests)} requests"
        if self._lost:
            raise DeviceError(self._lost)
        with explained(self._step.device, about):
            key = self._choose_graph(batch)
            words = self._step.inputs.send(batch)
            if self.announce is None:
                return self._pending(batch, self._compute(batch, key), about)
        frame = StepFrame(batch, key, words)
        # From here on an error that leaves this function, or an interrupt, is the engine's end: the
        # other ranks run the step, and wait for the sums of this one.
        self._lost = self._loss(f"was interrupted in {about}")
        try:
            with explained(self._step.device, about):
                self.announce(frame)
                sampled = self._compute(batch, key)
        except Exception as error:
            self._lost = self._loss(f"failed in {about}", f": {error or repr(error)}")
            raise DeviceError(self._lost) from error
        self._lost = ""
        with explained(self._step.device, about):
            return self._pending(batch, sampled, about)

    def _loss(self, what: str, why: str = "") -> str:
        return (
            f"rank 0 of {self._group.size} {what}, which the other ranks run too{why}; an engine "
            "needs all its ranks: start Kiln again"
        )

    @torch.inference_mode()
    def follow(self, frame: StepFrame) -> None:
        """Queue a step that rank 0 has announced. Raises what ``launch`` raises."""
        self._group.check()
        about = f"a step of {frame.batch.num_tokens} tokens"
        with explained(self._step.device, about):
            self._step.inputs.send_message(frame.words)
            self._compute(frame.batch, frame.key)

    def collect(self, step: PendingStep) -> StepOutput:
        """Wait for a step and return its tokens. Raises DeviceError if device or rank is lost."""
        with explained(self._step.device, step.description):
            tokens = () if step.samples is None else step.samples.wait(step.sampling)
            if step.failed:
                tokens = tuple(step.failed.get(one.request_id, one) for one in tokens)
            if step.prompts is not None:
                tokens = step.prompts.added_to(tokens)
            output = StepOutput(tokens)
        self._group.check()  # sums without all ranks give tokens that mean nothing
        return output

    def _compute(self, batch: Batch, key: GraphKey | None) -> Sampled | None:
        """Run the step of the message that was sent last. Ranks above 0 may return None."""
        sampling = _sampling(batch)
        return self._run(batch, sampling) if key is None else self._replay(key, batch, sampling)

    def _pending(self, batch: Batch, sampled: Sampled | None, about: str) -> PendingStep:
        """Start to copy the results of a step to the host."""
        if sampled is None:
            return PendingStep(about, (), None, {})
        copies = None if sampled.samples is None else self._copies.begin(sampled.samples)
        prompts = None if sampled.prompts is None else PendingPrompts(sampled.prompts, batch)
        return PendingStep(about, _sampling(batch), copies, sampled.failed, prompts)

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
    ) -> Sampled | None:
        used = len(sampling)
        logits = self._graphs.replay(key, batch, used)
        if not sampling:
            return None
        if batch.is_plain:
            return Sampled(self._step.samples(key.rows))
        return self._sample(logits[:used], sampling)  # once more, behind the graph

    def _run(self, batch: Batch, sampling: Sequence[ScheduledRequest]) -> Sampled | None:
        if self._adapters is None:
            return self._run_layers(batch, sampling)
        with self._adapters.step(batch):
            return self._run_layers(batch, sampling)

    def _run_layers(self, batch: Batch, sampling: Sequence[ScheduledRequest]) -> Sampled | None:
        inputs = self._step.inputs.make(batch)
        hidden = self._step.hidden(inputs)
        prompts = None
        if batch.reports_prompts:
            prompts = report_prompts(self._step.model, hidden, batch)
        if not sampling:
            return None if prompts is None else Sampled(None, prompts=prompts)
        logits = self._step.model.logits(hidden.index_select(0, inputs.sample_rows))
        sampled = self._sample(logits, sampling)
        return None if sampled is None else sampled._replace(prompts=prompts)

    def _sample(self, logits: torch.Tensor, sampling: Sequence[ScheduledRequest]) -> Sampled | None:
        """Sample on every rank alike; where a request edits its logits, on rank 0 for all.

        There a request that raises fails alone: the other ranks get a token of it like any other.
        """
        rows = len(sampling)
        settings, keys = self._step.inputs.sampling(rows)
        if all(request.is_plain for request in sampling):
            return Sampled(sample_tokens(logits, settings, keys, out=self._step.samples(rows)))
        own, sampled = self._step.inputs.sampled[:rows], None
        if self._group.rank == 0:
            each = partial(sample, masks=self._masks)
            sampled = sample_or_fail_alone(each, logits, settings, keys, sampling)
            assert sampled.samples is not None
            own.copy_(sampled.samples.tokens)
        self._group.broadcast(own)
        return sampled


def _sampling(batch: Batch) -> Sequence[ScheduledRequest]:
    """Return the requests of a step that sample."""
    if all(batch.columns.samples):
        return batch.requests
    return [request for request in batch.requests if request.samples]


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

    def close(self, *, wait: bool) -> None:
        """End the thread behind the steps that were launched."""
        self._thread.shutdown(wait=wait)
