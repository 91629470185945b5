"""A model's forward pass over the inputs of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kiln.engine.attention.context import AttentionStep, StepLayer, attention_step
from kiln.engine.attention.paged_layer import Attention
from kiln.engine.graphs.runner import GraphKey
from kiln.engine.models.family import Model
from kiln.engine.runner.inputs import ForwardInputs, Sizes, StepInputs
from kiln.jit_kernels.ops.sampling.functions import Samples, sample_tokens


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A model on one KV pool, to which ``layers`` are bound, and the tensors that it reads."""

    model: Model
    attention: Attention
    layers: Sequence[StepLayer]
    inputs: StepInputs
    vocab_size: int

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.inputs.sampled.device

    def hidden(self, inputs: ForwardInputs) -> torch.Tensor:
        """Return the final hidden states [num_tokens, hidden_size]."""
        plan = self.attention.plan(inputs.metadata)
        with attention_step(AttentionStep(self.layers, inputs.metadata, plan)):
            return self.model.forward(inputs.token_ids, inputs.positions)

    def whole(self, key: GraphKey) -> torch.Tensor:
        """Run a whole step of a fixed size; return the logits [rows, vocab_size].

        It is the step of the message that was sent last; what it lacks is padding. The sampled
        tokens go to ``inputs.results``. Nothing here depends on values on the host, so a graph of
        it can be replayed for any message.
        """
        rows = key.rows
        # Of a step with prefills the host does not know how the tokens are spread. This makes the
        # plan run every kernel that such a step can need; each one finds its own requests.
        spread = (1,) * rows if key.is_decode else (key.tokens, *(0,) * (rows - 1))
        inputs = self.inputs.fill(Sizes(key.tokens, rows, rows), spread, (0,) * rows)
        hidden = self.hidden(inputs)
        if not key.is_decode:  # else each token is a sample
            hidden = hidden.index_select(0, inputs.sample_rows)
        logits = self.model.logits(hidden)
        sample_tokens(logits, inputs.settings, inputs.keys, out=self.samples(rows))
        return logits

    def samples(self, rows: int) -> Samples:
        """Return the place of the results of a step of ``rows`` samples, without alternatives."""
        return Samples(self.inputs.results[: Samples.size_of(rows, 0)], rows)
