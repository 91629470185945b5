"""torch.ops.kiln.attention: everything between the qkv projection and the output projection.

For ``torch.compile`` it is one opaque operator, at which a graph can be split. It reads the layer's
settings, the KV pool and the step's plan from the global context, not from arguments, so nothing
that changes from step to step becomes part of a traced graph.
"""

from __future__ import annotations

import torch

from kiln.engine.attention.context import current_step
from kiln.engine.layers.opaque import opaque_operator


def run(qkv: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    """Normalise and rotate queries and keys, store keys and values, write the attention to out.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], which is overwritten; positions:
    [num_tokens] int64; out: [num_tokens, num_heads * head_dim]. ``layer`` is the index
    of the attention layer in the model. Raises LookupError outside of a step.
    """
    step = current_step()
    step.layers[layer](step, qkv, positions, out)


attention = opaque_operator(
    "attention(Tensor(a!) qkv, Tensor positions, Tensor(b!) out, int layer) -> ()", run
)
