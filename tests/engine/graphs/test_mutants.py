"""Faults that are planted in what a graph runs: each is found, most before the graph serves.

Where each fault of a graph is found:

    padding: slots that are stale or 0          here, by the comparison before serving: the canary
                                                and the keys and values of the requests
    padding: samples of rows that are not there here, by the comparison
    padding: tokens, positions, lengths, ends,  tests/jit_kernels/faults/step.py, by the kernel's
      settings, keys                            reference. They change only rows of padding, except
                                                stale ends, which would corrupt memory.
    a number of the host in a graph             here, by the comparison
    a value or host data read in a graph        here, by the emulator
    inputs at other addresses                   here, by the runner, at the first step
    results that the step behind cannot read    here, by the comparison
    a result that depends on earlier replays    here, by the comparison
    a kernel that the plan leaves out           here, by answers: the eager step lacks it too
    tokens sampled behind a graph and not kept  here, by answers
    attention of another step, or too late      here, by answers
    attention between pieces with padding       tests/engine/graphs/test_serving.py
    one staging buffer for the messages         tests/engine/runner/test_inputs.py
"""

from __future__ import annotations

import pytest
import torch
from depth import at_depth

from kiln.engine.attention.kernel_attention import KernelAttention
from kiln.engine.errors import ModelError
from kiln.engine.graphs import piecewise
from kiln.engine.graphs.emulator import CaptureError
from kiln.engine.graphs.piecewise import LayersBetween
from kiln.engine.runner import executor
from kiln.engine.runner import inputs as step_inputs_module
from kiln.engine.runner.forward import ModelStep
from kiln.engine.runner.inputs import StepInputs
from kiln.jit_kernels.ops.sampling.functions import Samples

USED = {"requests": 0, "tokens": 1, "samples": 2}  # words of a message


def wrap(monkeypatch, owner, name, make):
    """Replace a function by what ``make`` returns for it."""
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def padding(name, counted, value=None):
    """Give the padding of an input another value; without one, what the step before left."""

    def plant(monkeypatch):
        def make(real):
            def inputs(**named):
                tensor = named[name]
                before = tensor.clone()
                real(**named)
                place = torch.arange(len(tensor))
                padded = place >= named["message"][USED[counted]]
                wrong = before if value is None else torch.full_like(tensor, value)
                tensor.copy_(torch.where(padded, wrong, tensor))

            return inputs

        wrap(monkeypatch, step_inputs_module, "step_inputs", make)

    return plant


def number_of_the_host(monkeypatch):
    """The layout ends at the number of requests that the host knows, and the graph keeps it."""
    known = [0]

    def remember(real):
        def send(self, batch):
            known[0] = len(batch.requests)
            real(self, batch)

        return send

    def make(real):
        def inputs(**named):
            real(**named)
            named["seq_lens"][known[0] :].zero_()

        return inputs

    def forget(real):
        def clear(self):
            known[0] = 0
            real(self)

        return clear

    wrap(monkeypatch, StepInputs, "send", remember)
    wrap(monkeypatch, StepInputs, "clear", forget)
    wrap(monkeypatch, step_inputs_module, "step_inputs", make)


def value_read_in_the_layout(monkeypatch):
    def make(real):
        def inputs(**named):
            real(**named)
            named["seq_lens"][int(named["message"][0]) :].zero_()

        return inputs

    wrap(monkeypatch, step_inputs_module, "step_inputs", make)


def plan_that_reads_lengths(monkeypatch):
    def make(real):
        def plan(self, metadata):
            assert max(metadata.seq_lens.tolist()) >= 0
            return real(self, metadata)

        return plan

    wrap(monkeypatch, KernelAttention, "plan", make)


def plan_from_host_lists(monkeypatch):
    def make(real):
        def plan(self, metadata):
            metadata.seq_lens.copy_(torch.tensor(metadata.kv_lens))
            return real(self, metadata)

        return plan

    wrap(monkeypatch, KernelAttention, "plan", make)


def results_elsewhere(monkeypatch):
    def samples(self, rows):
        return Samples(torch.empty(Samples.size_of(rows, 0), dtype=torch.int32), rows)

    monkeypatch.setattr(ModelStep, "samples", samples)


def state_between_replays(monkeypatch):
    seen = torch.zeros(())

    def make(real):
        def whole(self, key):
            seen.add_(1)
            return real(self, key) + seen

        return whole

    wrap(monkeypatch, ModelStep, "whole", make)


COMPARED = {
    "stale slots": (padding("slot_mapping", "tokens"), ModelError, "padding wrote"),
    "padding in slot 0": (padding("slot_mapping", "tokens", 0), ModelError, "differ"),
    "stale samples": (padding("sample_rows", "samples"), IndexError, "out of range"),
    "a number of the host": (number_of_the_host, ModelError, "differ from an eager"),
    "a value read in the layout": (value_read_in_the_layout, CaptureError, "reads a value"),
    "a plan that reads lengths": (plan_that_reads_lengths, CaptureError, "tolist reads"),
    "a plan from host lists": (plan_from_host_lists, CaptureError, "from host data"),
    "results elsewhere": (results_elsewhere, ModelError, "not in the fixed results"),
    "state between replays": (state_between_replays, ModelError, "differ"),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", COMPARED)
def test_an_engine_with_this_fault_does_not_start(make_runner, environment, monkeypatch, name):
    plant, error, message = COMPARED[name]
    environment(KILN_GRAPH_VERIFY="full", KILN_GRAPH_STRICT="1")
    plant(monkeypatch)
    with pytest.raises(error, match=message):
        make_runner(bs=(2, 4), tokens=at_depth(8, 16))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["stale slots", "a number of the host"])
def test_without_strict_its_steps_run_eagerly_and_are_right(
    serve, requests, environment, monkeypatch, name
):
    environment(KILN_GRAPH_VERIFY="full")
    wanted = serve(requests[:4], graphs=False)
    COMPARED[name][0](monkeypatch)
    found = serve(requests[:4])
    assert found.stats.graph_fallbacks
    assert found.answers == wanted.answers


def moved_inputs(monkeypatch):
    """A message in new memory, as an input that grows would be."""

    def make(real):
        def send(self, batch):
            self.message = torch.zeros_like(self.message)
            real(self, batch)

        return send

    wrap(monkeypatch, StepInputs, "send", make)


def plan_without_prefill_kernel(monkeypatch):
    """The step is planned as if each request had one token."""

    def make(real):
        def plan(self, metadata):
            found = real(self, metadata)
            return type(found)(metadata, True, False) if 0 in metadata.kv_lens else found

        return plan

    wrap(monkeypatch, KernelAttention, "plan", make)


def tokens_not_kept(monkeypatch):
    """What is sampled behind a graph does not replace what the graph sampled."""

    def make(real):
        def sample(self, step, batch, masks):
            kept = self.step.inputs.sampled.clone()
            samples = real(self, step, batch, masks)
            if not batch.is_plain:
                self.step.inputs.sampled.copy_(kept)
            return samples

        return sample

    wrap(monkeypatch, executor.Executor, "_sample", make)


def attention_of_the_step_before(monkeypatch):
    """Attention between pieces keeps the first step that it saw."""

    def make(real):
        def begin(self, step):
            if self._step is None:
                real(self, step)

        return begin

    wrap(monkeypatch, LayersBetween, "begin", make)


def attention_before_its_piece(monkeypatch):
    """A piece is not ended before attention: the order of the split is lost."""

    def make(real):
        def layers(self, between):
            late = []
            found = real(self, late.append)

            def last(step, *tensors):
                found[-1](step, *tensors)
                for call in late:
                    between(call)

            return [*found[:-1], last]

        return layers

    wrap(monkeypatch, piecewise.LayersBetween, "layers", make)


ANSWERED = {
    "moved inputs": (moved_inputs, "full"),
    "a plan without the kernel of prefills": (plan_without_prefill_kernel, "full"),
    "tokens that are not kept": (tokens_not_kept, "full"),
    "attention of the step before": (attention_of_the_step_before, "piecewise"),
    "attention before its piece": (attention_before_its_piece, "piecewise"),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ANSWERED)
def test_answers_tell_this_fault(serve, requests, environment, monkeypatch, name):
    """Without any comparison before serving."""
    plant, mode = ANSWERED[name]
    environment(KILN_GRAPH_VERIFY="off", KILN_GRAPH_PREFILL=mode)
    bias = {"logit_bias": dict.fromkeys(range(20), 100.0)}  # one of these, by what is before
    edited = [(prompt, {**own, **bias}) for prompt, own in requests[:2]]
    mixed = [*requests[2:6], *edited]
    wanted = serve(mixed, graphs=False)
    assert serve(mixed).answers == wanted.answers
    plant(monkeypatch)
    assert serve(mixed).answers != wanted.answers
