"""Two LLMs, one after the other, in one process: closing gives the device memory back."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from gpu.pace import Row
from kiln import LLM, SamplingParams

_DEMO = Path(__file__).resolve().parents[2] / "engine" / "demo"
_OPENED, _CLOSED = 1 << 29, 8 << 20  # bytes: at least while it is open, at most afterwards
_WORKSPACES = 2 * (32 << 20)  # cuBLAS keeps one for each of the two streams, from the first LLM on
_KINDS = {
    "decode graphs": {},
    "no graphs": {"disable_cuda_graph": True},
    "adapters": {"lora_modules": {"sentence": str(_DEMO / "adapters/sentence")}},
}


def memory_after_close(args: argparse.Namespace) -> list[Row]:
    """Make, use and close each kind of LLM twice; one row per LLM."""
    return [_use_and_close(kind, number) for kind in _KINDS for number in (1, 2)]


def _use_and_close(kind: str, number: int) -> Row:
    before = torch.cuda.memory_allocated()
    llm = LLM(str(_DEMO), device="cuda", num_kv_blocks=60_000, **_KINDS[kind])
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    lora = "sentence" if kind == "adapters" else None
    [output] = llm.generate([[5, 6, 7]], greedy, lora=lora)
    opened = torch.cuda.memory_allocated() - before
    llm.close()
    closed = torch.cuda.memory_allocated() - before
    is_first = before == 0
    return {
        "kind": kind,
        "number": number,
        "tokens": len(output.outputs[0].token_ids),
        "open_mib": opened >> 20,
        "closed_mib": closed >> 20,
        "reserved_mib": torch.cuda.memory_reserved() >> 20,
        "ok": opened >= _OPENED and closed <= _CLOSED + is_first * _WORKSPACES,
    }
