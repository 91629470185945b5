"""vLLM in a process of its own, so that it loads into an empty GPU with its own packages."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kiln.engine.bench import vllm_worker
from kiln.engine.bench.engine import Adapters, BenchEngine, BenchError, check_lengths
from kiln.engine.config import EngineConfig, LoRAConfig
from kiln.engine.errors import ConfigError
from kiln.engine.models.registry import read_model
from kiln.engine.runner.device import resolve_device, resolve_dtype

_FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
_FIND_SECONDS = 60
_CLOSE_SECONDS = 60
_SHOWN_LINES = 15  # of vLLM's log, if it fails
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


class VLLMEngine(BenchEngine):
    """vLLM. ``python``: an interpreter that can import vllm.

    It gets the same limits, dtypes, memory share and seed as Kiln. Its other settings are its own
    defaults, except for prefix caching, which is off: a benchmark repeats its prompts.
    """

    product = "vllm"

    def __init__(self, config: EngineConfig, python: str, *, with_tokenizer: bool = False) -> None:
        super().__init__(config)
        self._folders = [str(Path(module.path).resolve()) for module in config.lora.modules]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the engine)
        # -P: the worker's folder must not be searched for the modules that vLLM imports.
        self._process = subprocess.Popen(
            [python, "-P", str(vllm_worker.__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            keywords = {**llm_keywords(config), "skip_tokenizer_init": not with_tokenizer}
            loaded = self._ask({"llm": keywords})
        except BaseException:
            self.close()
            raise
        self.load_seconds = float(loaded["seconds"])
        self.versions = loaded["versions"]
        self.token_budget = loaded["token_budget"]

    def run(
        self,
        prompts: list[list[int]],
        lengths: list[int],
        adapters: Adapters = None,
        structured: Mapping[str, Any] | None = None,
    ) -> float:
        """Generate; return the seconds. ``structured`` outputs need the tokenizer."""
        asked: dict[str, Any] = {"prompts": prompts, "lengths": lengths, "structured": structured}
        if adapters is not None:
            asked["adapters"] = [self._adapter(name) for name in adapters]
        done = self._ask(asked)
        check_lengths(self.name, done["made"], lengths)
        return float(done["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()  # it ends when its input ends
            self._process.wait(_CLOSE_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _adapter(self, name: str | None) -> tuple[str, int, str] | None:
        """Return the arguments of vLLM's LoRARequest; its id, from 1 on, tells adapters apart."""
        if name is None:
            return None
        index = self.adapters.index(name)
        return name, index + 1, self._folders[index]

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Send a line and return the answer. Raises BenchError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:  # the process is gone
            line = ""
        answer = json.loads(line) if line else {"error": "its process ended"}
        if "error" in answer:
            raise BenchError(f"vllm: {answer['error']}\nthe end of its log:\n{self._last_lines()}")
        return dict(answer)

    def _last_lines(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_SHOWN_LINES:])


def llm_keywords(config: EngineConfig) -> dict[str, Any]:
    """Return the keywords of ``vllm.LLM`` for a config of Kiln on a GPU."""
    model, limits, budget = config.model, config.scheduler, config.scheduler.max_num_batched_tokens
    folder, ranks = Path(model.model), config.parallel.tensor_parallel_size
    dtype = resolve_dtype(model.dtype, read_model(folder)[1], resolve_device(model.device))
    return {
        "model": str(folder.resolve()),
        "load_format": model.load_format,
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        **({} if model.quantization is None else {"quantization": model.quantization}),
        "kv_cache_dtype": config.kv.kv_cache_dtype,
        "max_model_len": model.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        **({"max_num_batched_tokens": budget} if budget is not None else {}),
        "gpu_memory_utilization": config.kv.pool_memory("cuda"),
        "enable_prefix_caching": False,
        "seed": model.seed or 0,
        **({"tensor_parallel_size": ranks} if ranks > 1 else {}),
        **_lora_keywords(config.lora),
    }


def _lora_keywords(lora: LoRAConfig) -> dict[str, Any]:
    """Return room for all adapters at once; nothing without adapters."""
    if not lora.modules:
        return {}
    count, rank = lora.num_slots, lora.max_lora_rank
    keywords: dict[str, Any] = {"enable_lora": True, "max_loras": count, "max_cpu_loras": count}
    if rank is not None:
        # vLLM accepts only these; it refuses a larger one itself.
        keywords["max_lora_rank"] = next((size for size in _RANKS if size >= rank), rank)
    return keywords


def require_vllm(python: str, device: str) -> None:
    """Raise ConfigError if vLLM cannot be measured beside Kiln on this device."""
    try:
        missing = subprocess.run(
            [python, "-c", _FIND], capture_output=True, timeout=_FIND_SECONDS, check=False
        ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--baseline-python {python}: it does not run ({error})") from error
    if missing:
        raise ConfigError(
            f"--baseline vllm: {python} has no package vllm: install it there, or give another "
            "interpreter with --baseline-python"
        )
    place = resolve_device(device)
    if place.type != "cuda" or place.index:
        raise ConfigError(
            f"--baseline vllm with --device {device}: vLLM runs on the first GPU that it sees, so "
            "Kiln must run there too: use cuda:0, and CUDA_VISIBLE_DEVICES to choose the GPU"
        )
