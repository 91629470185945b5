"""A model's forward pass over the inputs of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kiln.engine.attention.context import AttentionStep, StepLayer, attention_step
from kiln.engine.attention.paged_layer import Attention
from kiln.engine.graphs.runner import GraphKey
from kiln.engine.models.family import Model
from kiln.engine.requests.batch import Batch
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
        return self._sampled(key, inputs, self.hidden(inputs))

    def prepare(self, key: GraphKey, batch: Batch) -> AttentionStep:
        """Lay out the inputs of the message that was sent last, padded, and plan its attention."""
        metadata = self.inputs.make(batch, key.tokens, key.rows).metadata
        return AttentionStep(self.layers, metadata, self.attention.plan(metadata))

    def prepared(self, key: GraphKey, layers: Sequence[StepLayer]) -> torch.Tensor:
        """Run a step of a fixed size with other attention layers on inputs that are laid out.

        Returns the logits [rows, vocab_size].
        """
        inputs = self.inputs.views(Sizes(key.tokens, key.rows, key.rows))
        with attention_step(AttentionStep(layers, inputs.metadata, None)):
            hidden = self.model.forward(inputs.token_ids, inputs.positions)
        return self._sampled(key, inputs, hidden)

    def _sampled(self, key: GraphKey, inputs: ForwardInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Sample a token for each row; return the logits."""
        if not key.is_decode:  # else each token is a sample
            hidden = hidden.index_select(0, inputs.sample_rows)
        logits = self.model.logits(hidden)
        sample_tokens(logits, inputs.settings, inputs.keys, out=self.samples(key.rows))
        return logits

    def samples(self, rows: int) -> Samples:
        """Return the place of the results of a step of ``rows`` samples, without alternatives."""
        return Samples(self.inputs.results[: Samples.size_of(rows, 0)], rows)
