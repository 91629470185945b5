"""Compare greedy tokens of tiny models on the GPU with transformers, in float32.

Some have LoRA adapters, which transformers gets merged into its weights.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from gpu.pace import Pace, Row
from kiln import LLM, SamplingParams
from kiln.engine.bench.lora_adapters import RandomAdapter

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
LORA_FAMILIES = ("Llama", "Qwen3")
_RANKS = {"a3": 3, "a16": 16, "a64": 64}  # of the adapters; their names
_CHUNKS = (1, 7, 64, None)


def parity(args: argparse.Namespace) -> list[Row]:
    """Compare each family, alone and batched, for each chunk size."""
    exact_products()
    chunks = _CHUNKS[: 2 if args.quick else None]
    pace = Pace(args, seconds=140)
    return pace.rows(FAMILIES, str, lambda family: rows_of(family, chunks, "cuda"))


def rows_of(family: str, chunks: Sequence[int | None], device: str) -> Iterator[Row]:
    """Yield a row for each chunk size, and one with LoRA adapters where the family has them."""
    with tempfile.TemporaryDirectory() as name:
        folder, given = Path(name), prompts()
        model = made_model(family, folder)
        wanted = [generate(model.to(device), prompt, device) for prompt in given]
        for chunk in chunks:
            yield _row(family, chunk, _kiln(folder, given, chunk, device), wanted)
        if family not in LORA_FAMILIES:
            return
        names, paths, wanted, changed = with_adapters(model, folder, given, wanted, device)
        for chunk in chunks:
            got = _kiln(folder, given, chunk, device, paths, names)
            row = _row(f"{family} with LoRA", chunk, got, wanted) | {"changed": changed}
            yield row | {"ok": row["ok"] and changed > 0}


def exact_products() -> None:
    """Compute products of float32 in float32: TF32 would turn exact ties into near ties."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def made_model(family: str, folder: Path) -> Any:
    """Return a random model of a family in float32, and save it in a folder."""
    torch.manual_seed(11)
    config = getattr(transformers, f"{family}Config")(**{**_COMMON, **FAMILIES[family]})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder)
    return model


def prompts() -> list[list[int]]:
    """Return random prompts of 3 to 35 tokens."""
    return [torch.randint(3, 320, (n,)).tolist() for n in range(3, 37, 2)]


def _row(model: str, chunk: int | None, got: list[list[int]], wanted: list[list[int]]) -> Row:
    wrong = sum(a != b for a, b in zip(got, wanted, strict=True))
    return {
        "model": model,
        "chunk": chunk or "whole",
        "prompts": len(wanted),
        "wrong": wrong,
        "ok": wrong == 0,
    }


def with_adapters(
    model: Any, folder: Path, given: list[list[int]], base: list[list[int]], device: str
) -> tuple[list[str | None], dict[str, str], list[list[int]], int]:
    """Make adapters, and deal them and the base model among prompts.

    Returns the adapter of each prompt, their folders, the tokens of transformers with the adapter
    merged, and how many of those differ from the base model's.
    """
    names = [[None, *_RANKS][index % 4] for index in range(len(given))]
    merged, paths = {}, {}
    for seed, (name, rank) in enumerate(_RANKS.items()):
        adapter = RandomAdapter.of_model(
            folder, rank, torch.float32, std=rank**-0.25 / 3, seed=seed
        )
        paths[name] = str(folder / name)
        adapter.save(Path(paths[name]))
        merged[name] = _merge(copy.deepcopy(model), adapter)
    wanted = [
        generate(merged[name], prompt, device) if name else own
        for name, prompt, own in zip(names, given, base, strict=True)
    ]
    return names, paths, wanted, sum(a != b for a, b in zip(wanted, base, strict=True))


@torch.no_grad()
def _merge(model: Any, adapter: RandomAdapter) -> Any:
    """Add B A to the weights; an adapter's alpha is its rank."""
    tensors = dict(adapter.tensors())
    for target in adapter.targets:
        prefix = f"base_model.model.{target.name}.lora_"
        weight = model.get_submodule(target.name).weight
        product = tensors[prefix + "B.weight"].double() @ tensors[prefix + "A.weight"].double()
        weight.copy_(weight.double() + product.to(weight.device))
    return model


def generate(model: Any, prompt: list[int], device: str) -> list[int]:
    """Return the greedy tokens of transformers."""
    ids = torch.tensor([prompt], device=device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def _kiln(
    folder: Path,
    prompts: list[list[int]],
    chunk: int | None,
    device: str,
    adapters: dict[str, str] | None = None,
    names: list[str | None] | None = None,
) -> list[list[int]]:
    llm = LLM(
        str(folder), device=device, dtype="float32", max_chunk_tokens=chunk, num_kv_blocks=256,
        lora_modules=adapters,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, lora=names)]
