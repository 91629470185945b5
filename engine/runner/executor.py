"""One step after another on the device: inputs, forward pass, sampling, results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from kiln.engine.distributed.group import Group
from kiln.engine.errors import DeviceError, KilnError, ModelError
from kiln.engine.graphs.device import Between
from kiln.engine.graphs.runner import CudaGraphRunner, GraphKey
from kiln.engine.requests.batch import Batch, SampledTokens, ScheduledRequest, StepOutput
from kiln.engine.runner.failures import explained
from kiln.engine.runner.forward import ModelStep
from kiln.engine.runner.masks import Masks
from kiln.engine.runner.prompt_logprobs import PendingPrompts, report_prompts
from kiln.engine.runner.sample_alone import Sampled, sample_or_fail_alone
from kiln.engine.runner.sampler import HostCopies, PendingSamples, sample
from kiln.engine.runner.step_frame import StepFrame
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


class Executor:
    """Runs the steps of a model, in graphs where there are any.

    One of ``shadow`` steps in graphs is also run without its graph, and the results are compared;
    0: none is. With ``strict`` a difference is an error. ``announce``, if it is set, gets every
    step before rank 0 runs it, for the other ranks.
    """

    def __init__(
        self,
        step: ModelStep,
        graphs: CudaGraphRunner | None,
        copies: HostCopies,
        group: Group,
        *,
        shadow: int = 0,
        strict: bool = False,
    ) -> None:
        self.step = step
        self.graphs = graphs
        self.group = group
        self.announce: Callable[[StepFrame], None] | None = None
        self._copies = copies
        self._shadow, self._strict = shadow, strict
        self._num_in_graphs = 0
        self._sums: dict[GraphKey, Mapping[str, int]] = {}  # of a replay, by algorithm
        self._masks = Masks(step.inputs.history)
        self._lost = ""  # why the other ranks are not where this one is
        if graphs is not None:
            group.before_close(graphs.free_later())

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step on the current stream; on a CPU, run it.

        Raises DeviceError if the device is lost, ConfigError if memory ran out.
        """
        about = f"a step of {batch.num_tokens} tokens in {len(batch.requests)} requests"
        if self._lost:
            raise DeviceError(self._lost)
        with explained(self.step.device, about):
            key = self._graph_of(batch)
            words = self.step.inputs.send(batch)
            if self.announce is None:
                return self._pending(batch, self._compute(batch, key), about)
        frame = StepFrame(batch, key, words)
        # From here on an error that leaves this function, or an interrupt, is the engine's end: the
        # other ranks run the step, and wait for the sums of this one.
        self._lost = self._loss(f"was interrupted in {about}")
        try:
            with explained(self.step.device, about):
                self.announce(frame)
                sampled = self._compute(batch, key)
        except Exception as error:
            self._lost = self._loss(f"failed in {about}", f": {error or repr(error)}")
            raise DeviceError(self._lost) from error
        self._lost = ""
        with explained(self.step.device, about):
            return self._pending(batch, sampled, about)

    def _loss(self, what: str, why: str = "") -> str:
        return (
            f"rank 0 of {self.group.size} {what}, which the other ranks run too{why}; an engine "
            "needs all its ranks: start Kiln again"
        )

    @torch.inference_mode()
    def follow(self, frame: StepFrame) -> None:
        """Queue a step that rank 0 has announced. Raises what ``launch`` raises."""
        self.group.check()
        about = f"a step of {frame.batch.num_tokens} tokens"
        with explained(self.step.device, about):
            self.step.inputs.send_message(frame.words)
            self._compute(frame.batch, frame.key)

    def collect(self, step: PendingStep) -> StepOutput:
        """Wait for a step and return its tokens. Raises DeviceError if device or rank is lost."""
        with explained(self.step.device, step.description):
            tokens = () if step.samples is None else step.samples.wait(step.sampling)
            if step.failed:
                tokens = tuple(step.failed.get(one.request_id, one) for one in tokens)
            if step.prompts is not None:
                tokens = step.prompts.added_to(tokens)
            output = StepOutput(tokens)
        self.group.check()  # sums without all ranks give tokens that mean nothing
        return output

    def _pending(self, batch: Batch, sampled: Sampled | None, about: str) -> PendingStep:
        """Start to copy the results of a step to the host."""
        if sampled is None:
            return PendingStep(about, (), None, {})
        copies = None
        if sampled.samples is not None:
            rejected = self.step.inputs.rejected if batch.has_drafts else None
            copies = self._copies.begin(sampled.samples, rejected)
        prompts = None if sampled.prompts is None else PendingPrompts(sampled.prompts, batch)
        return PendingStep(about, _sampling(batch), copies, sampled.failed, prompts)

    def _graph_of(self, batch: Batch) -> GraphKey | None:
        """Return the graph that a batch runs in; None, and the reason is counted, if in none."""
        graphs = self.graphs
        if graphs is None or not graphs.is_ready:
            return None
        reason = self.step.why_eager(batch)
        if not reason:
            return graphs.choose(batch)
        graphs.counts.fallbacks[reason] += 1
        return None

    def _compute(self, batch: Batch, key: GraphKey | None) -> Sampled | None:
        """Run the step of the message that was sent last. Ranks above 0 may return None."""
        if key is None:
            return self._run(batch)
        logits = self._run_in_graph(key, batch)
        if not batch.num_samples:
            return None
        if batch.is_plain:
            return Sampled(self.step.samples(key.samples))
        return self._sample(logits[: batch.num_samples], batch)  # once more, behind the graph

    def _run(self, batch: Batch) -> Sampled | None:
        with self.step.adapted(batch):
            inputs = self.step.inputs.make(batch)
            hidden = self.step.hidden(inputs)
            prompts = None
            if batch.reports_prompts:
                prompts = report_prompts(self.step.model, hidden, batch)
            if not batch.num_samples:
                return None if prompts is None else Sampled(None, prompts=prompts)
            logits = self.step.model.logits(hidden.index_select(0, inputs.sample_rows))
        sampled = self._sample(logits, batch)
        return None if sampled is None else sampled._replace(prompts=prompts)

    def _sample(self, logits: torch.Tensor, batch: Batch) -> Sampled | None:
        """Sample on every rank alike; where a request edits its logits, on rank 0 for all.

        There a request that raises fails alone: the other ranks get a token of it like any other.
        """
        inputs, rows = self.step.inputs, batch.num_samples
        settings, keys = inputs.sampling(rows)
        sampling = [one for one in batch.requests for _ in range(one.num_samples)]
        sampled = None
        if all(request.is_plain for request in sampling):
            sampled = Sampled(sample_tokens(logits, settings, keys, out=self.step.samples(rows)))
        else:
            own = inputs.sampled[:rows]
            if self.group.rank == 0:
                each = partial(sample, masks=self._masks)
                lengths = inputs.lengths(rows)
                sampled = sample_or_fail_alone(each, logits, settings, keys, lengths, sampling)
                assert sampled.samples is not None
                own.copy_(sampled.samples.tokens)
            self.group.broadcast(own)
        if batch.has_drafts:
            inputs.verify()
        return sampled

    def _run_in_graph(self, key: GraphKey, batch: Batch) -> torch.Tensor:
        """Replay a graph for a batch; return its logits.

        Raises DeviceError if a shadow step differs and graphs are strict.
        """
        self._num_in_graphs += 1
        if not self._shadow or self._num_in_graphs % self._shadow:
            return self.replay(key, batch)
        inputs, used = self.step.inputs, batch.num_samples
        before = inputs.state()
        logits = self.replay(key, batch)[:used].clone()
        tokens, rejected = inputs.state()
        inputs.restore(before)
        eager = self.without_graph(key, batch)
        same = torch.equal(tokens[:used], inputs.sampled[:used])
        same = same and torch.equal(logits, eager[:used])
        same = same and torch.equal(rejected, inputs.rejected)
        # While serving only a DeviceError ends the process; others are errors of requests.
        self.judge(key, "" if same else "its results differ from an eager step's", DeviceError)
        return eager

    def replay(self, key: GraphKey, batch: Batch) -> torch.Tensor:
        """Run the step of the message that was sent last in a graph; return its logits."""
        assert self.graphs is not None
        self.step.prepare(key, batch)
        self.group.count(self._sums.get(key, {}))
        return self.graphs.replay(key)

    def without_graph(self, key: GraphKey, batch: Batch) -> torch.Tensor:
        """Do the same without the graph."""
        self.step.prepare(key, batch)
        return self.step.fixed(key, lambda call: call())

    def record(self, key: GraphKey, between: Between) -> torch.Tensor:
        """Run a step that may be captured; on a GPU, keep how many sums a replay will do."""
        before = Counter(self.group.stats())
        with self.group.capture():
            logits = self.step.fixed(key, between)
        if self.step.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._sums[key] = Counter(self.group.stats()) - before
            self.group.uncount(self._sums[key])
        return logits

    def judge(self, key: GraphKey, difference: str, error: type[KilnError] = ModelError) -> None:
        """Drop a graph that differs on any rank. Raises ``error`` instead if graphs are strict."""
        assert self.graphs is not None
        if not self.group.minimum([not difference])[0]:
            difference = difference or "on another rank it differs from an eager step"
        if not difference:
            return
        if self._strict:
            raise error(f"the CUDA graph of {key}: {difference} (KILN_GRAPH_STRICT=1)")
        self.graphs.drop(key, difference)


def _sampling(batch: Batch) -> Sequence[ScheduledRequest]:
    """Return the requests of a step that sample."""
    if all(batch.columns.num_samples):
        return batch.requests
    return [request for request in batch.requests if request.num_samples]


class ThreadedExecutor:
    """The same on a CPU, in a thread: the caller schedules while the step runs."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kiln-step")

    def launch(self, batch: Batch) -> Future[PendingStep]:
        """Queue a step behind those that were launched before."""
        return self._thread.submit(self._executor.launch, batch)

    def collect(self, step: Future[PendingStep]) -> StepOutput:
        """Wait for a step and return its tokens. Raises what the step raised."""
        return self._executor.collect(step.result())

    def close(self, *, wait: bool) -> None:
        """End the thread behind the steps that were launched."""
        self._thread.shutdown(wait=wait)
