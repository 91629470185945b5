"""The forward pass of a model over the inputs of a step, eager and in the form of its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from kiln.engine.attention.context import AttentionStep, StepLayer, attention_step
from kiln.engine.attention.kernel_attention import KernelAttention
from kiln.engine.attention.paged_layer import Attention
from kiln.engine.graphs.device import Between
from kiln.engine.graphs.piecewise import LayersBetween
from kiln.engine.graphs.runner import GraphKey
from kiln.engine.lora.runtime import Adapters
from kiln.engine.models.family import Model
from kiln.engine.requests.batch import Batch
from kiln.engine.runner.inputs import ForwardInputs, Sizes, StepInputs
from kiln.jit_kernels.ops.sampling.functions import Samples, sample_tokens


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A model on one KV pool, to which ``layers`` are bound, and the tensors that it reads.

    A graph contains attention if attention plans on the device, and for steps with prefills only
    with ``whole_prefills``. Otherwise attention runs between the pieces of the graph, in the layers
    of ``between``.
    """

    model: Model
    attention: Attention
    layers: Sequence[StepLayer]
    inputs: StepInputs
    vocab_size: int
    adapters: Adapters | None
    graph_adapters: Adapters | None  # the same, if graphs can apply them
    between: LayersBetween
    whole_prefills: bool

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.inputs.sampled.device

    def adapted(self, batch: Batch) -> AbstractContextManager[None]:
        """Apply the LoRA adapters of a batch to what runs inside a ``with`` block."""
        return nullcontext() if self.adapters is None else self.adapters.step(batch)

    def hidden(self, inputs: ForwardInputs) -> torch.Tensor:
        """Return the final hidden states [num_tokens, hidden_size]."""
        plan = self.attention.plan(inputs.metadata)
        with attention_step(AttentionStep(self.layers, inputs.metadata, plan)):
            return self.model.forward(inputs.token_ids, inputs.positions)

    def why_eager(self, batch: Batch) -> str:
        """Return why a batch runs in no graph, whatever its size; "" if it may."""
        if batch.reports_prompts:
            return "log-probabilities of a prompt"
        if batch.reports_hidden:
            return "hidden states"
        if batch.has_adapters:
            if self.graph_adapters is None:
                return "a LoRA adapter"
            if not self.graph_adapters.fit(batch):
                return "a LoRA adapter with more ranks than graphs have room for"
        return ""

    def clear(self) -> None:
        """Make all inputs padding before a capture, so that it reads nothing of an earlier step."""
        self.inputs.clear()
        if self.graph_adapters is not None:
            self.graph_adapters.clear()

    def head(self, hidden: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """Return the logits of hidden states of requests with adapters in these slots."""
        adapters = nullcontext() if self.adapters is None else self.adapters.rows(slots)
        with adapters:
            return self.model.logits(hidden)

    def fixed(self, key: GraphKey, between: Between) -> torch.Tensor:
        """Run a step of a fixed size; return the logits [samples, vocab_size].

        It is the step of the message that was sent last and of ``prepare``; what it lacks is
        padding. The sampled tokens go to ``inputs.results``. Nothing here depends on values on the
        host, so a graph of it can be replayed for any message.
        """
        adapters = self.graph_adapters if key.variant else None
        fixed = nullcontext() if adapters is None else adapters.fixed_step(key.tokens, key.samples)
        with fixed:
            return self.whole(key) if self._is_whole(key) else self._pieces(key, between)

    def prepare(self, key: GraphKey, batch: Batch) -> None:
        """Set what a step of a fixed size needs besides the message."""
        if key.variant and self.graph_adapters is not None:
            self.graph_adapters.fill(batch, key.tokens, key.samples)
        if not self._is_whole(key):
            metadata = self.inputs.make(batch, key.tokens, key.samples).metadata
            plan = self.attention.plan(metadata)
            self.between.begin(AttentionStep(self.layers, metadata, plan))

    def whole(self, key: GraphKey) -> torch.Tensor:
        """Do what ``fixed`` does, attention and its plan included."""
        rows = key.rows
        # Of a step with prefills the host does not know how the tokens are spread. This makes the
        # plan run every kernel that such a step can need; each one finds its own requests.
        spread = (key.row_tokens,) * rows if key.is_decode else (key.tokens, *(0,) * (rows - 1))
        inputs = self.inputs.fill(Sizes(key.tokens, rows, key.samples), spread, (0,) * rows)
        return self._sampled(key, inputs, self.hidden(inputs))

    def _pieces(self, key: GraphKey, between: Between) -> torch.Tensor:
        """Do what ``fixed`` does, with attention between pieces, on inputs that are laid out."""
        inputs = self.inputs.views(Sizes(key.tokens, key.rows, key.samples))
        layers = self.between.layers(between)
        with attention_step(AttentionStep(layers, inputs.metadata, None)):
            hidden = self.model.forward(inputs.token_ids, inputs.positions)
        return self._sampled(key, inputs, hidden)

    def _is_whole(self, key: GraphKey) -> bool:
        plans_on_device = isinstance(self.attention, KernelAttention)
        return plans_on_device and (key.is_decode or self.whole_prefills)

    def _sampled(self, key: GraphKey, inputs: ForwardInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Sample the step's tokens and verify its drafts; return the logits."""
        if not key.is_decode:  # else each token is a sample
            hidden = hidden.index_select(0, inputs.sample_rows)
        logits = self.model.logits(hidden)
        sample_tokens(logits, inputs.settings, inputs.keys, out=self.samples(key.samples))
        if key.row_tokens > 1:
            self.inputs.verify()
        return logits

    def samples(self, count: int) -> Samples:
        """Return the place of the results of a step of ``count`` samples, without alternatives."""
        return Samples(self.inputs.results[: Samples.size_of(count, 0)], count)
