"""A model's forward pass over the inputs of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kiln.engine.attention.context import AttentionStep, StepLayer, attention_step
from kiln.engine.attention.paged_layer import Attention
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

    def decode(self, rows: int) -> torch.Tensor:
        """Run a whole step of one token in each of ``rows`` rows; return the logits [rows, vocab].

        It is the step of the message that was sent last; rows that it lacks are padding. The
        sampled tokens go to ``inputs.results``. Nothing here depends on values on the host, so a
        graph of it can be replayed for any message.
        """
        inputs = self.inputs.fill(Sizes(rows, rows, rows), (1,) * rows, (0,) * rows)
        logits = self.model.logits(self.hidden(inputs))  # each token is a sample
        sample_tokens(logits, inputs.settings, inputs.keys, out=self.samples(rows))
        return logits

    def samples(self, rows: int) -> Samples:
        """Return the place of the results of a step of ``rows`` samples, without alternatives."""
        return Samples(self.inputs.results[: Samples.size_of(rows, 0)], rows)
