"""Kiln, through ``LLM.generate`` in this process."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from kiln.engine.bench.device_time import busy_ms, device_work
from kiln.engine.bench.engine import Adapters, BenchEngine, Tell, check_lengths
from kiln.engine.config import EngineConfig
from kiln.engine.errors import ConfigError
from kiln.engine.llm import LLM
from kiln.engine.models.progress import announcement
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.runner.device import resolve_device
from kiln.engine.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class MustFit:
    """Requests that must be in the KV pool at once, and the tokens of each."""

    num_requests: int
    num_tokens: int


class KilnEngine(BenchEngine):
    """Kiln. Tokens go in and come out; there is no tokenizer, nor a prefix cache: prompts repeat.

    Raises what ``LLM`` raises, and ConfigError if the KV pool is too small for ``must_fit``.
    """

    product = "kiln"

    def __init__(self, config: EngineConfig, tell: Tell, must_fit: MustFit | None = None) -> None:
        config = replace(config, kv=replace(config.kv, enable_prefix_caching=False))
        super().__init__(config)

        def progress(stage: str, done: int, total: int) -> None:
            tell(f"{self.name}: {announcement(stage, total)}")

        begun = time.perf_counter()
        self._llm = LLM.from_config(config, skip_tokenizer_init=True, progress=progress)
        self.load_seconds = time.perf_counter() - begun
        self.token_budget = self._llm.core.scheduler.config.max_num_batched_tokens
        self.lora_backend = self._find_lora_backend() if self.adapters else None
        self._on_gpu = resolve_device(config.model.device).type == "cuda"
        if must_fit is not None:
            self._check_room(must_fit, config.kv.block_size)

    def run(self, prompts: list[list[int]], lengths: list[int], adapters: Adapters = None) -> float:
        """Generate; return the seconds."""
        params = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths
        ]
        begun = time.perf_counter()
        outputs = self._llm.generate(prompts, params, lora=adapters)
        seconds = time.perf_counter() - begun
        check_lengths(self.name, [len(one.outputs[0].token_ids) for one in outputs], lengths)
        return seconds

    def step_details(
        self, prompts: list[list[int]], skipped: int, steps: int, adapters: Adapters = None
    ) -> dict[str, Any]:
        """Return what ``device_work`` measures; nothing on a CPU."""
        if not self._on_gpu:
            return {}
        return device_work(self._llm.core, prompts, skipped, steps, adapters)

    def device_ms(self, prompts: list[list[int]], lengths: list[int]) -> float | None:
        """Return what the profiler saw; None on a CPU."""
        return busy_ms(lambda: self.run(prompts, lengths)) if self._on_gpu else None

    def close(self) -> None:
        """Free the weights and the KV pool, and stop the other ranks."""
        self._llm.close()
        del self._llm
        gc.collect()
        if self._on_gpu:
            torch.cuda.empty_cache()

    def _find_lora_backend(self) -> str | None:
        """Return what computes the adapters' parts, and why; None without adapters."""
        runner = self._llm.core.runner
        return runner.loaded.kernels.get("lora") if isinstance(runner, ModelRunner) else None

    def _check_room(self, wanted: MustFit, block_size: int) -> None:
        """Without room for all rows at once, a step would have fewer rows than its row says."""
        needed = wanted.num_requests * -(-wanted.num_tokens // block_size)
        there = self._llm.core.stats().kv_blocks_total
        if needed > there:
            raise ConfigError(
                f"{wanted.num_requests} requests of {wanted.num_tokens} tokens need {needed} KV "
                f"blocks, and the pool has {there}: measure fewer or shorter requests, or raise "
                f"{'--gpu-memory-utilization' if self._on_gpu else '--kv-memory-gib'}"
            )
