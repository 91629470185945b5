"""One step after another on the device: inputs, forward pass, sampling, results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from kiln.engine.distributed.group import Group
from kiln.engine.errors import DeviceError, KilnError, ModelError
from kiln.engine.graphs.device import Between
from kiln.engine.graphs.runner import Choice, CudaGraphRunner, GraphKey
from kiln.engine.requests.batch import Batch, SampledTokens, ScheduledRequest, StepOutput
from kiln.engine.requests.late_masks import LateMasks, rows_of
from kiln.engine.runner.drafters import Propose
from kiln.engine.runner.failures import explained
from kiln.engine.runner.forward import ModelStep
from kiln.engine.runner.masks import Masks
from kiln.engine.runner.reports import PendingReports, Reports, reports_of
from kiln.engine.runner.sample_alone import Sampled, sample_or_fail_alone
from kiln.engine.runner.sampler import HostCopies, PendingSamples, ToSample, sample
from kiln.engine.runner.step_frame import StepFrame
from kiln.jit_kernels.ops.sampling.functions import sample_tokens

_NO_GRAPHS = Choice(None, why_eager="there are no CUDA graphs")


class Late(NamedTuple):
    """A step whose forward pass is queued, and whose sampling is not."""

    logits: torch.Tensor
    reports: Reports | None


class PendingStep(NamedTuple):
    """A launched step.

    ``late`` is what its sampling needs, until it is launched too. ``samples`` is None if no request
    samples, ``reports`` if none wants any; ``failed`` as of Sampled; ``choice``: the graph.
    """

    batch: Batch
    late: Late | None = None
    samples: PendingSamples | None = None
    reports: PendingReports | None = None
    failed: Mapping[str, SampledTokens] = {}
    choice: Choice = _NO_GRAPHS


class Executor:
    """Runs the steps of a model, in graphs where there are any.

    One of ``shadow`` steps in graphs is also run without its graph, and the results are compared;
    0: none is. With ``strict`` a difference is an error. ``announce``, if it is set, gets for the
    other ranks every step before rank 0 runs it, and None before it samples a late one.
    ``propose`` makes the drafts for the step behind.
    """

    def __init__(
        self,
        step: ModelStep,
        graphs: CudaGraphRunner | None,
        copies: HostCopies,
        group: Group,
        *,
        propose: Propose | None = None,
        shadow: int = 0,
        strict: bool = False,
    ) -> None:
        self.step = step
        self.graphs = graphs
        self.group = group
        self.announce: Callable[[StepFrame | None], None] | None = None
        self.propose = propose
        self._copies = copies
        self._shadow, self._strict = shadow, strict
        self._num_in_graphs = 0
        self._sums: dict[GraphKey, Mapping[str, int]] = {}  # of a replay, by algorithm
        self._masks = Masks(step.inputs.history)
        self._followed: tuple[Batch, Late] | None = None  # a late step that is not sampled yet
        self._lost = ""  # why the other ranks are not where this one is
        if graphs is not None:
            group.before_close(graphs.free_later())

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Queue a step on the current stream; on a CPU, run it. A late step is not sampled.

        Raises DeviceError if the device is lost, ConfigError if memory ran out.
        """
        if self._lost:
            raise DeviceError(self._lost)
        with explained(self.step.device, _about(batch)):
            choice = self._graph_of(batch)
            words = self.step.inputs.send(batch)
        compute = partial(self._compute, batch, choice.key)
        if self.announce is None:
            return self._explained(batch, compute)._replace(choice=choice)
        announce = partial(self.announce, StepFrame(batch, choice.key, words))
        return self._on_all_ranks(batch, announce, compute)._replace(choice=choice)

    @torch.inference_mode()
    def bind(self, step: PendingStep, masks: LateMasks) -> PendingStep:
        """Queue the sampling of a late step under its masks. No step is launched in between."""
        assert step.late is not None, "its sampling is queued already"
        compute = partial(self._sample, step.late, step.batch, masks)
        if self.announce is None:
            return self._explained(step.batch, compute)._replace(choice=step.choice)
        announce = partial(self.announce, None)
        return self._on_all_ranks(step.batch, announce, compute)._replace(choice=step.choice)

    def _explained(self, batch: Batch, compute: Callable[[], Late | Sampled | None]) -> PendingStep:
        with explained(self.step.device, _about(batch)):
            return self._pending(batch, compute())

    def _on_all_ranks(
        self,
        batch: Batch,
        announce: Callable[[], None],
        compute: Callable[[], Late | Sampled | None],
    ) -> PendingStep:
        """Do on this rank what the others are told to do.

        An error that leaves it, or an interrupt, is the engine's end: the other ranks run the step,
        and wait for the sums of this one.
        """
        about = _about(batch)
        self._lost = self._loss(f"was interrupted in {about}")
        try:
            with explained(self.step.device, about):
                announce()
                computed = compute()
        except Exception as error:
            self._lost = self._loss(f"failed in {about}", f": {error or repr(error)}")
            raise DeviceError(self._lost) from error
        self._lost = ""
        return self._explained(batch, lambda: computed)

    def _loss(self, what: str, why: str = "") -> str:
        return (
            f"rank 0 of {self.group.size} {what}, which the other ranks run too{why}; an engine "
            "needs all its ranks: start Kiln again"
        )

    @torch.inference_mode()
    def follow(self, frame: StepFrame) -> None:
        """Queue a step that rank 0 has announced. Raises what ``launch`` raises."""
        self.group.check()
        self._followed = None  # frees the logits of a late step that rank 0 never sampled
        with explained(self.step.device, _about(frame.batch)):
            self.step.inputs.send_message(frame.words)
            computed = self._compute(frame.batch, frame.key)
            if isinstance(computed, Late):
                self._followed = (frame.batch, computed)
            else:
                self._propose_after(frame.batch)

    @torch.inference_mode()
    def follow_sampling(self) -> None:
        """Queue the sampling of the late step that was followed last. Raises what ``bind`` does."""
        assert self._followed is not None, "rank 0 samples late steps alone apart"
        (batch, late), self._followed = self._followed, None
        with explained(self.step.device, _about(batch)):
            self._sample(late, batch, {})
            self._propose_after(batch)

    def collect(self, step: PendingStep) -> StepOutput:
        """Wait for a step and return its tokens. Raises DeviceError if device or rank is lost."""
        with explained(self.step.device, _about(step.batch)):
            tokens = () if step.samples is None else step.samples.wait(_sampling(step.batch))
            if step.failed:
                tokens = tuple(step.failed.get(one.request_id, one) for one in tokens)
            if step.reports is not None:
                tokens = step.reports.added_to(tokens)
            output = StepOutput(tokens, step.choice.size, step.choice.why_eager)
        self.group.check()  # sums without all ranks give tokens that mean nothing
        return output

    def _pending(self, batch: Batch, computed: Late | Sampled | None) -> PendingStep:
        """Start to copy the results of a step to the host."""
        if computed is None:
            return PendingStep(batch)
        if isinstance(computed, Late):
            return PendingStep(batch, computed)
        copies = reports = None
        if computed.samples is not None:
            counts = self.step.inputs.draft_counts if batch.has_drafts else None
            copies = self._copies.begin(computed.samples, counts)
        self._propose_after(batch)  # behind the copy, because it changes the counts
        if computed.reports is not None:
            reports = PendingReports(computed.reports, batch)
        return PendingStep(batch, None, copies, reports, computed.failed)

    def _graph_of(self, batch: Batch) -> Choice:
        """Return the graph that a batch runs in. If it runs in none, the reason is counted."""
        graphs = self.graphs
        if graphs is None or not graphs.is_ready:
            return _NO_GRAPHS
        reason = self.step.why_eager(batch)
        return graphs.refuse(reason) if reason else graphs.choose(batch)

    def _compute(self, batch: Batch, key: GraphKey | None) -> Late | Sampled | None:
        """Run the step of the message that was sent last. Ranks above 0 may return None."""
        reports = None
        if key is not None:
            logits = self._run_in_graph(key, batch)
            if batch.num_samples and batch.is_plain:
                return Sampled(self.step.samples(key.samples))
            logits = logits[: batch.num_samples]  # sampled once more, behind the graph
        else:
            logits, reports = self._run(batch)
        if not batch.num_samples:
            return None if reports is None else Sampled(None, reports=reports)
        late = Late(logits, reports)
        return late if batch.is_late else self._sample(late, batch, {})

    def _run(self, batch: Batch) -> tuple[torch.Tensor, Reports | None]:
        """Run a step without a graph; return the logits of its samples, and what it reports."""
        with self.step.adapted(batch):
            inputs, reports = self.step.inputs.make(batch), None
            hidden = self.step.hidden(inputs)
            logits = hidden
            if batch.num_samples:
                logits = self.step.model.logits(hidden.index_select(0, inputs.sample_rows))
        if batch.reports_prompts or batch.reports_hidden:
            reports = reports_of(self.step.head, hidden, batch)
        return logits, reports

    def _sample(self, step: Late, batch: Batch, masks: LateMasks) -> Sampled | None:
        """Sample on every rank alike; where a request edits its logits, on rank 0 for all.

        There a request that raises fails alone: the other ranks get a token of it like any other.
        """
        inputs, rows = self.step.inputs, batch.num_samples
        settings, keys = inputs.sampling(rows)
        sampled = None
        if all(request.is_plain for request in _sampling(batch)):
            own = self.step.samples(rows)
            sampled = Sampled(sample_tokens(step.logits, settings, keys, out=own))
        else:
            tokens = inputs.sampled[:rows]
            if self.group.rank == 0:
                requests = [one for one in batch.requests for _ in range(one.num_samples)]
                late = rows_of(masks, batch)
                to_sample = ToSample(
                    step.logits, settings, keys, inputs.lengths(rows), requests, late
                )
                sampled = sample_or_fail_alone(partial(sample, masks=self._masks), to_sample)
                assert sampled.samples is not None
                tokens.copy_(sampled.samples.tokens)
            self.group.broadcast(tokens)
        if batch.has_drafts:
            inputs.verify()
        return None if sampled is None else sampled._replace(reports=step.reports)

    def _propose_after(self, batch: Batch) -> None:
        if self.propose is not None and batch.wanted_drafts and batch.num_samples:
            self.propose(batch)

    def _run_in_graph(self, key: GraphKey, batch: Batch) -> torch.Tensor:
        """Run a step in its graph, and return the logits.

        Raises DeviceError if this is a shadow step, its run without the graph gives other results,
        and graphs are strict.
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


def _about(batch: Batch) -> str:
    return f"a step of {batch.num_tokens} tokens in {len(batch.requests)} requests"


def _sampling(batch: Batch) -> Sequence[ScheduledRequest]:
    """Return the requests of a step that sample."""
    if all(batch.columns.num_samples):
        return batch.requests
    return [request for request in batch.requests if request.num_samples]
