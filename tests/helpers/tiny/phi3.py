"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini."""

from __future__ import annotations

from typing import Any

import torch

from tiny.model import Tiny

FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
LISTS = {  # of heads of 16 elements
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.1, 2.2, 2.9, 3.5],
    "long_factor": [1.2, 2.0, 3.1, 5.0, 8.0, 13.0, 21.0, 40.0],
}
LONGROPE = {
    "original_max_position_embeddings": 26,  # requests with prompts of 1 to 9, and the rest
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1000.0, **LISTS},
}


def by_longest(model: Any, token_ids: torch.Tensor, total: int) -> torch.Tensor:
    """Return the logits with the list for requests that may grow to ``total`` tokens."""
    ids = token_ids[None]
    longest = model.config.original_max_position_embeddings
    short = total <= longest
    # transformers goes by the longest position of a forward pass, so one row is made longer: there
    # is no attention to what comes later, nor from one row to the next.
    padded = ids if short else torch.nn.functional.pad(ids, (0, max(0, longest + 1 - ids.shape[1])))
    assert not short or ids.shape[1] <= longest
    logits: torch.Tensor = model(padded).logits[0, : len(token_ids)]
    return logits


def older(kind: str, partial: float | None = None) -> Any:
    """Return an edit to config.json as transformers 4 wrote it."""

    def edit(content: dict[str, Any]) -> None:
        rope = content.pop("rope_parameters")
        content["rope_theta"] = rope.pop("rope_theta")
        del rope["rope_type"], rope["partial_rotary_factor"]
        rope.pop("original_max_position_embeddings", None)
        content["rope_scaling"] = {
            **rope, "type": kind, "short_mscale": 1.1, "long_mscale": 1.3,
            "original_max_position_embeddings": 3,  # the one at the top counts
        }  # fmt: skip
        content |= {"resid_pdrop": 0.1, "full_attn_mod": 1, "interpolate_factor": 1}
        content |= {"lm_head_bias": False, "attention_bias": False, "mlp_bias": False}

    return edit


def drop(*names: str) -> Any:
    """Return an edit that leaves keys out."""

    def edit(content: dict[str, Any]) -> None:
        for name in names:
            del content[name]

    return edit


MODELS = [
    Tiny("phi3", "Phi3Config", {"num_key_value_heads": 4}, targets=FUSED,
         edit=drop("rope_parameters", "sliding_window", "num_key_value_heads", "rms_norm_eps",
                   "original_max_position_embeddings")),
    Tiny("phi3-window", "Phi3Config", {"sliding_window": 7, "head_dim": 24}, targets=FUSED),
    Tiny("phi3-longrope", "Phi3Config", LONGROPE, logits=by_longest, targets=FUSED,
         edit=older("su")),
    Tiny("phi3-longrope-window-odd", "Phi3Config",
         {**LONGROPE, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96,
          "sliding_window": 9, "intermediate_size": 106,
          "rope_parameters": {**LONGROPE["rope_parameters"], "attention_factor": 1.19}},
         logits=by_longest, targets=FUSED, edit=older("yarn")),
    Tiny("phi4-mini", "Phi3Config",
         {**LONGROPE, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
          "rope_parameters": {**LONGROPE["rope_parameters"], "factor": 5.0,
                              **{name: values[1:7] for name, values in LISTS.items()}}},
         logits=by_longest, targets=FUSED),
    Tiny("phi3-partial", "Phi3Config", {"partial_rotary_factor": 0.5, "num_key_value_heads": 1},
         targets=FUSED),
]  # fmt: skip
