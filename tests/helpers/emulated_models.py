"""A forward pass of Llama, Phi-3 and Qwen3-MoE in float64, as a quantised checkpoint means it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from packers.packer import Packed
from quantised_folders import Made, is_sparse

Adapter = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By name of a layer: A [rank, in] and B [out, rank], times their scaling, in float64."""


@dataclass(frozen=True)
class Emulated:
    """The model of a checkpoint. ``rounds``: activations too, by the packer's rule.

    ``ranks``: how many parts the inputs of row-parallel layers have, each rounded on its own.
    ``adapter`` adds to the layers that it names, from inputs that are not rounded. ``noise``: of
    the inputs of each rounding, relative, for what a less exact arithmetic does.
    """

    made: Made
    rounds: bool = True
    ranks: int = 1
    adapter: Adapter = field(default_factory=dict)
    noise: float = 0.0
    modules: Mapping[str, Packed] | None = None  # instead of the checkpoint's

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Return the logits [len(ids), vocab] of a prompt."""
        return self.run(ids)[0]

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Return the logarithms of the probabilities of the next token, [len(ids), vocab]."""
        return self.logits(ids).log_softmax(-1)

    def run(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits, and how far each token is from a choice of other experts, [len(ids)].

        That is the difference of two logits of the router.
        """
        config, tensors = self.made.config, self.made.tensors
        x = tensors["model.embed_tokens.weight"][torch.tensor(ids)]
        gaps = torch.full((len(ids),), torch.inf, dtype=torch.float64)
        for layer in range(config["num_hidden_layers"]):
            place = f"model.layers.{layer}."
            x = x + self._attention(self._norm(x, f"{place}input_layernorm"), f"{place}self_attn.")
            y = self._norm(x, f"{place}post_attention_layernorm")
            if is_sparse(config, layer):
                added, gap = self._experts(y, f"{place}mlp.")
                x, gaps = x + added, torch.minimum(gaps, gap)
            else:
                x = x + self._mlp(y, f"{place}mlp.")
        return self._norm(x, "model.norm") @ tensors["lm_head.weight"].T, gaps

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.made.config["rms_norm_eps"]
        return F.rms_norm(x, x.shape[-1:], self.made.tensors[f"{name}.weight"], eps)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        module = (self.modules or self.made.modules).get(name)
        weight = self.made.tensors[f"{name}.weight"] if module is None else module.weight
        seen = x if module is None else self._rounded(x, name, module)
        y = seen @ weight.T
        bias = self.made.tensors.get(f"{name}.bias")
        if bias is not None:
            y = y + bias
        return y + self._added(x, seen, name) if name in self.adapter else y

    def _added(self, x: torch.Tensor, seen: torch.Tensor, name: str) -> torch.Tensor:
        """Return what the adapter adds. ``seen``: x as the weights see it."""
        first, second = self.adapter[name]
        return x @ first.T @ second.T

    def _rounded(self, x: torch.Tensor, name: str, module: Packed) -> torch.Tensor:
        rule = self.made.packer.rounded
        if rule is None or not self.rounds:
            return x
        if self.noise:
            draw = torch.Generator().manual_seed(int(1e9 * self.noise) + x.numel())
            x = x * (1 + self.noise * torch.randn(x.shape, generator=draw, dtype=x.dtype))
        parts = self.ranks if name.endswith(("o_proj", "down_proj")) else 1
        return torch.cat([rule(part, module) for part in x.chunk(parts, dim=1)], dim=1)

    def _parts(self, x: torch.Tensor, place: str, names: str, *sizes: int) -> list[torch.Tensor]:
        """Return the outputs of several layers, which the checkpoint may have as one."""
        fused = f"{place}{'qkv' if names == 'q k v' else names.replace(' ', '_')}_proj"
        if f"{fused}.weight" in self.made.tensors:
            return [*self._linear(x, fused).split(sizes, 1)]
        return [self._linear(x, f"{place}{name}_proj") for name in names.split()]

    def _attention(self, x: torch.Tensor, place: str) -> torch.Tensor:
        config, size = self.made.config, self.made.config["head_dim"]
        sizes = (config["num_attention_heads"] * size, *[config["num_key_value_heads"] * size] * 2)
        q, k, v = (
            part.view(len(x), -1, size).transpose(0, 1)
            for part in self._parts(x, place, "q k v", *sizes)
        )
        if f"{place}q_norm.weight" in self.made.tensors:
            q, k = self._norm(q, f"{place}q_norm"), self._norm(k, f"{place}k_norm")
        repeats = config["num_attention_heads"] // config["num_key_value_heads"]
        q, k = self._rotated(q), self._rotated(k).repeat_interleave(repeats, 0)
        mask = torch.full((len(x), len(x)), -torch.inf, dtype=x.dtype).triu(1)
        weights = (q @ k.transpose(1, 2) / size**0.5 + mask).softmax(-1)
        heads = weights @ v.repeat_interleave(repeats, 0)
        return self._linear(heads.transpose(0, 1).flatten(1), f"{place}o_proj")

    def _rotated(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate [heads, tokens, size] by position; the second half pairs with the first."""
        half = heads.shape[2] // 2
        powers = torch.arange(half, dtype=torch.float64) / half
        angles = torch.arange(heads.shape[1])[:, None] * self.made.config["rope_theta"] ** -powers
        first, second = heads.split(half, dim=2)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)

    def _mlp(self, x: torch.Tensor, place: str) -> torch.Tensor:
        inner = self.made.config["intermediate_size"]
        gate, up = self._parts(x, place, "gate up", inner, inner)
        return self._linear(F.silu(gate) * up, f"{place}down_proj")

    def _experts(self, x: torch.Tensor, place: str) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.made.config
        logits = x @ self.made.tensors[f"{place}gate.weight"].T
        top_k = config["num_experts_per_tok"]
        order = logits.sort(descending=True).values
        chances, chosen = logits.softmax(-1).topk(top_k)
        if config["norm_topk_prob"]:
            chances = chances / chances.sum(1, keepdim=True)
        y = torch.zeros_like(x)
        for expert in range(config["num_experts"]):
            rows, nth = (chosen == expert).nonzero(as_tuple=True)
            if len(rows):
                own = self._mlp(x[rows], f"{place}experts.{expert}.")
                y[rows] += chances[rows, nth, None] * own
        return y, order[:, top_k - 1] - order[:, top_k]


def changed(model: Emulated, change: Callable[[str, Packed], Packed]) -> Emulated:
    """Return the model with other modules: ``change`` takes the name and the module of each."""
    own = {name: change(name, module) for name, module in model.made.modules.items()}
    return replace(model, modules=own)
