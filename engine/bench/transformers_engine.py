"""transformers in this process: static batches, or its continuous batching."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from kiln.engine.bench.engine import Adapters, BenchEngine, BenchError, check_lengths
from kiln.engine.config import EngineConfig
from kiln.engine.models.registry import read_model
from kiln.engine.runner.device import resolve_device, resolve_dtype

_NO_TOKEN = -1  # the EOS id: no token ends a sequence
_WAIT_SECONDS = 1.0  # between checks that the worker still runs


class _Transformers(BenchEngine):
    """A model run by transformers, with the device and the dtype that Kiln chooses."""

    product = "transformers"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        begun = time.perf_counter()
        self._place = resolve_device(config.model.device)
        self._model: Any = _load(config, self._place)
        self._prepare()
        self.load_seconds = time.perf_counter() - begun

    def _prepare(self) -> None:
        """Prepare what the first request needs."""

    def close(self) -> None:
        """Free the model."""
        self._model = None
        gc.collect()
        if self._place.type == "cuda":
            torch.cuda.empty_cache()


class StaticBatches(_Transformers):
    """``generate`` on ``batch_size`` requests at a time, or on all for None.

    A batch runs until its longest request is complete.
    """

    def __init__(self, config: EngineConfig, batch_size: int | None = None) -> None:
        super().__init__(config)
        self.name = "transformers, static batches" + (f" of {batch_size}" if batch_size else "")
        self._batch_size = batch_size

    def run(self, prompts: list[list[int]], lengths: list[int], adapters: Adapters = None) -> float:
        """Generate; return the seconds."""
        assert adapters is None, "no benchmark of LoRA measures transformers"
        begun = time.perf_counter()
        size = self._batch_size or len(prompts)
        for start in range(0, len(prompts), size):
            batch = slice(start, start + size)
            longest = max(lengths[batch])
            made = _generate(self._model, prompts[batch], longest)
            rows = len(prompts[batch])
            check_lengths(self.name, [made // rows] * rows, [longest] * rows)
        return time.perf_counter() - begun


class ContinuousBatches(_Transformers):
    """Continuous batching over a paged KV cache, with transformers' own settings."""

    _started = False

    def run(self, prompts: list[list[int]], lengths: list[int], adapters: Adapters = None) -> float:
        """Generate; return the seconds."""
        assert adapters is None, "no benchmark of LoRA measures transformers"
        begun = time.perf_counter()
        ids = [
            self._manager.add_request(input_ids=prompt, max_new_tokens=length)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        if not self._started:  # some versions fail if the worker finds no request when it starts
            self._manager.start()
            self._started = True
        made: dict[str, int] = {}
        while len(made) < len(ids):
            result = self._manager.get_result(timeout=_WAIT_SECONDS)
            if result is None and not self._manager.is_running():
                raise BenchError(f"{self.name}: its worker ended after {len(made)} requests")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise BenchError(f"{self.name}: a request failed: {result.error}")
                made[result.request_id] = len(result.generated_tokens)
        seconds = time.perf_counter() - begun
        check_lengths(self.name, [made[one] for one in ids], lengths)
        return seconds

    def close(self) -> None:
        """Stop the worker, and free the model."""
        if self._started:
            self._manager.stop(block=True)
        del self._manager
        super().close()

    def _prepare(self) -> None:
        self.name = "transformers, continuous batching"
        greedy = GenerationConfig(do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=0)
        self._manager = self._model.init_continuous_batching(generation_config=greedy)
        if hasattr(self._manager, "warmup"):  # captures its CUDA graphs
            self._manager.warmup()


@torch.inference_mode()
def _generate(model: Any, prompts: list[list[int]], output_tokens: int) -> int:
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


def _load(config: EngineConfig, place: torch.device) -> Any:
    """Return the model with its weights, or with random ones for ``dummy``."""
    transformers.utils.logging.disable_progress_bar()  # the benchmark has its own display
    folder = Path(config.model.model)
    _, read = read_model(folder)
    dtype = resolve_dtype(config.model.dtype, read, place)
    if config.model.load_format == "dummy":
        with place:  # random numbers of a large model would take a CPU minutes
            shape = AutoConfig.from_pretrained(folder, local_files_only=True)
            return AutoModelForCausalLM.from_config(shape, dtype=dtype).eval()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to(place).eval()
