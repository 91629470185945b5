"""transformers' ``generate`` on one batch of prompts."""

from __future__ import annotations

from typing import Any

import torch


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], output_tokens: int) -> int:
    """Run one batch, padded on the left, and return how many tokens it generated."""
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    made = model.generate(
        input_ids=torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=output_tokens,
        min_new_tokens=output_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=0,
    )
    return int((made.shape[1] - longest) * made.shape[0])
