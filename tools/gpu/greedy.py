"""Compare greedy tokens of tiny models on the GPU with transformers, in float32."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from kiln import LLM, SamplingParams

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": False},
    "Mistral": {"head_dim": 32, "sliding_window": None},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "Mixtral": {"num_local_experts": 6},
    "Qwen3Moe": {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3,
                 "moe_intermediate_size": 48, "mlp_only_layers": [0]},
}  # fmt: skip
_CHUNKS = (1, 7, 64, None)


def parity(args: argparse.Namespace, device: str = "cuda") -> list[dict[str, Any]]:
    """Compare each family, alone and batched, for each chunk size."""
    # TF32 products would turn exact ties into near ties.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    rows = []
    for family, extra in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(11)
            config = getattr(transformers, f"{family}Config")(**{**_COMMON, **extra})
            model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
            model.save_pretrained(folder)
            prompts = [torch.randint(3, 320, (n,)).tolist() for n in range(3, 37, 2)]
            wanted = [_generate(model.to(device), prompt, device) for prompt in prompts]
            for chunk in _CHUNKS[: 2 if args.quick else None]:
                got = _kiln(Path(folder), prompts, chunk, device)
                wrong = sum(a != b for a, b in zip(got, wanted, strict=True))
                rows.append(
                    {
                        "model": family,
                        "chunk": chunk or "whole",
                        "prompts": len(prompts),
                        "wrong": wrong,
                        "ok": wrong == 0,
                    }
                )
    return rows


def _generate(model: Any, prompt: list[int], device: str) -> list[int]:
    ids = torch.tensor([prompt], device=device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def _kiln(
    folder: Path, prompts: list[list[int]], chunk: int | None, device: str
) -> list[list[int]]:
    llm = LLM(
        str(folder), device=device, dtype="float32", max_chunk_tokens=chunk, num_kv_blocks=256
    )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
