"""The engine's frozen settings, one per flag. Kernels are chosen by environment toggles instead."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from kiln.engine.errors import ConfigError

DType = Literal["auto", "float32", "float16", "bfloat16"]
DTypeName = DType | Literal["float", "fp32", "half", "fp16", "bf16"]
LoadFormat = Literal["auto", "dummy"]
Task = Literal["auto", "generate", "embed"]
TASKS: tuple[Task, ...] = get_args(Task)
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3"]  # the last two mean the same
KV_CACHE_DTYPES: tuple[KVCacheDType, ...] = get_args(KVCacheDType)
SchedulingPolicy = Literal["fcfs", "priority"]
SCHEDULING_POLICIES: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)
DEVICES = ("auto", "cpu", "cuda")
_MAX_NUM_SEQS = {"cuda": 256, "cpu": 64}  # by kind of device
SpeculativeMethod = Literal["ngram"]
SPECULATIVE_METHODS: tuple[SpeculativeMethod, ...] = get_args(SpeculativeMethod)
MAX_LOOKUP = 31  # tokens; the same as of the kernel propose_ngram
MAX_DRAFTS = 15  # with the token ahead, as many as a row of decode attention takes
LEAST_BUDGET = 2048  # of the defaults of max_num_batched_tokens


def dtype_named(name: object) -> str:
    """Return the dtype of a DTypeName in any case, or of a torch.dtype; other texts as they are."""
    text = str(name).removeprefix("torch.").lower()
    others = {"float32": ("float", "fp32"), "float16": ("half", "fp16"), "bfloat16": ("bf16",)}
    return next((dtype for dtype, names in others.items() if text in names), text)


def _require(fine: bool, name: str, value: object, wanted: str) -> None:
    if not fine:
        raise ConfigError(f"{name}={value!r}: must be {wanted}")


def _require_one(name: str, value: object, choices: Sequence[str]) -> None:
    _require(value in choices, name, value, f"one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model. ``model`` is a folder in Hugging Face format or a hub id.

    ``revision`` is a branch, a tag or a commit of the hub's repository. ``tokenizer`` is another
    folder or hub id to read the tokenizer and its chat templates from. ``hf_overrides`` is a JSON
    object that is merged into config.json: null removes a key, and objects are merged key by key.
    ``dtype`` may be a DTypeName or a torch.dtype too.
    """

    model: str
    _: KW_ONLY
    revision: str | None = None
    tokenizer: str | None = None  # None: the model's own
    tokenizer_revision: str | None = None
    hf_overrides: str | None = None
    dtype: DType = "auto"
    device: str = "auto"
    load_format: LoadFormat = "auto"
    quantization: str | None = None  # "fp8" quantises weights of floats when they are loaded
    max_model_len: int | None = None  # tokens, prompt and output; None: the model's own
    seed: int | None = None  # of requests without one; None: drawn from the system
    task: Task = "auto"  # auto: what the folder is made for

    def __post_init__(self) -> None:
        """Check the choices. Raises ConfigError."""
        device = self.device.partition(":")[0]
        _require(device in DEVICES, "device", self.device, f"one of {', '.join(DEVICES)}")
        dtype, wanted = dtype_named(self.dtype), "auto, float32, float16 (half, fp16) or bfloat16"
        _require(dtype in get_args(DType), "dtype", str(self.dtype)[:80], f"{wanted} (bf16)")
        object.__setattr__(self, "dtype", dtype)
        _require_one("load_format", self.load_format, get_args(LoadFormat))
        _require_one("task", self.task, TASKS)
        if self.max_model_len is not None:
            _require(self.max_model_len >= 2, "max_model_len", self.max_model_len, "2 or more")
        for name in ("revision", "tokenizer", "tokenizer_revision"):
            value = getattr(self, name)
            _require(value is None or value.strip(), name, value, "unset, or not empty")
        self.overrides  # noqa: B018 (it checks)

    @property
    def overrides(self) -> dict[str, Any]:
        """What ``hf_overrides`` says; empty if it is not set. Raises ConfigError."""
        text = "{}" if self.hf_overrides is None else self.hf_overrides
        try:
            read = json.loads(text)
        except (ValueError, RecursionError):
            read = None
        fine = isinstance(read, dict)
        _require(fine, "hf_overrides", text[:80], 'a JSON object, such as {"rope_theta": 1e6}')
        return dict(read)

    def at(self, folder: Path, tokenizer: Path | None = None) -> ModelConfig:
        """Return the same model in local folders. ``tokenizer`` None: it is in ``folder``."""
        own = None if tokenizer is None else str(tokenizer)
        return replace(
            self, model=str(folder), tokenizer=own, revision=None, tokenizer_revision=None
        )


@dataclass(frozen=True, slots=True)
class KVConfig:
    """The KV pool.

    With ``num_blocks`` None, ``gpu_memory_utilization`` sizes it on a GPU (default 0.9), and
    ``kv_memory_gib`` on a CPU (default 1).
    """

    _: KW_ONLY
    block_size: int = 16  # tokens
    num_blocks: int | None = None
    gpu_memory_utilization: float | None = None  # fraction of the GPU's memory for all of Kiln
    kv_memory_gib: float | None = None  # GiB for the pool
    kv_cache_dtype: KVCacheDType = "auto"  # auto: the model's dtype; the others: 8-bit floats
    enable_prefix_caching: bool = True  # requests share the blocks of equal beginnings
    kv_offload_gib: float = 0.0  # GiB of host memory, of all ranks, for blocks that were evicted

    def __post_init__(self) -> None:
        """Check the ranges. Raises ConfigError."""
        _require(1 <= self.block_size <= 256, "block_size", self.block_size, "1 to 256 tokens")
        share, memory = self.gpu_memory_utilization, self.kv_memory_gib
        if self.num_blocks is not None:
            _require(self.num_blocks >= 1, "num_blocks", self.num_blocks, "1 or more")
            for name, value in (("gpu_memory_utilization", share), ("kv_memory_gib", memory)):
                _require(value is None, name, value, "unset if num_kv_blocks is set")
        if share is not None:
            _require(0 < share <= 1, "gpu_memory_utilization", share, "above 0 and at most 1")
        _require(memory is None or memory > 0, "kv_memory_gib", memory, "above 0")
        host, caching = self.kv_offload_gib, self.enable_prefix_caching
        _require(0 <= host < math.inf, "kv_offload_gib", host, "0 or more GiB")
        _require(caching or not host, "kv_offload_gib", host, "0 without enable_prefix_caching")
        _require_one("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)

    def pool_memory(self, device: str) -> float:
        """Return ``gpu_memory_utilization`` on "cuda" and ``kv_memory_gib`` on "cpu".

        Raises ConfigError if the setting for the other kind of device was given.
        """
        gpu = ("gpu_memory_utilization", self.gpu_memory_utilization, 0.9)
        cpu = ("kv_memory_gib", self.kv_memory_gib, 1.0)
        (name, value, default), (other, unfit, _) = (cpu, gpu) if device == "cpu" else (gpu, cpu)
        if unfit is not None:
            raise ConfigError(
                f"{other}={unfit!r}: does not size the KV pool on {device}; set {name} instead"
            )
        return default if value is None else value


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The token budget of a step, and the limits on requests."""

    _: KW_ONLY
    max_num_seqs: int | None = None  # running requests; None: 256 on a GPU, 64 on a CPU
    max_num_batched_tokens: int | None = None  # token budget of a step; None: see runner.budget
    max_chunk_tokens: int | None = None  # longest prefill chunk; None: the token budget
    max_waiting: int = 1024  # longest queue; more requests are rejected
    overlap: bool = True  # launch each step before the tokens of the one before are known
    scheduling_policy: SchedulingPolicy = "fcfs"  # see ``requests.waiting``

    def __post_init__(self) -> None:
        """Check the ranges. Raises ConfigError."""
        _require_one("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting", "max_chunk_tokens"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "1 or more")

    def for_device(self, kind: str) -> SchedulerConfig:
        """Return the same with all limits set, for a device of kind "cuda" or "cpu"."""
        own = replace(self, max_num_seqs=self.max_num_seqs or _MAX_NUM_SEQS[kind])
        return own.with_budget(self.max_num_batched_tokens or LEAST_BUDGET)

    def with_budget(self, tokens: int) -> SchedulerConfig:
        """Return the same with a token budget."""
        return replace(self, max_num_batched_tokens=tokens)

    @property
    def num_rows(self) -> int:
        """``max_num_seqs``, which ``for_device`` has set."""
        assert self.max_num_seqs is not None, "call for_device first"
        return self.max_num_seqs

    @property
    def budget(self) -> int:
        """``max_num_batched_tokens``, which ``for_device`` has set."""
        assert self.max_num_batched_tokens is not None, "call for_device first"
        return self.max_num_batched_tokens


@dataclass(frozen=True, slots=True)
class GraphConfig:
    """The CUDA graphs of decode steps. ``max_bs`` and ``bs`` are in rows of a batch."""

    _: KW_ONLY
    enabled: bool = True
    max_bs: int | None = None  # largest size to capture; None: max_num_seqs
    bs: tuple[int, ...] | None = None  # sizes to capture; None: geometric sizes up to max_bs
    garbage_collection: bool = False  # while graphs are captured, which it slows down

    def __post_init__(self) -> None:
        """Check the ranges. Raises ConfigError."""
        _require(self.max_bs is None or self.max_bs >= 1, "cuda_graph_max_bs", self.max_bs, ">= 1")
        if self.bs is not None:
            fine = bool(self.bs) and min(self.bs) >= 1
            _require(fine, "cuda_graph_bs", self.bs, "a list of sizes of 1 or more")
            both = self.max_bs is None
            _require(both, "cuda_graph_max_bs", self.max_bs, "unset if cuda_graph_bs is set")


@dataclass(frozen=True, slots=True)
class LoRAModule:
    """A LoRA adapter to load: its name for requests, and its folder."""

    name: str
    path: str

    def __post_init__(self) -> None:
        """Check the name. Raises ConfigError."""
        fine = self.name.isprintable() and not set(self.name) & set(" :=")
        wanted = "1 to 128 printable characters without spaces, ':' and '='"
        _require(fine and 0 < len(self.name) <= 128, "LoRA adapter name", self.name, wanted)
        _require(bool(self.path), f"path of LoRA adapter {self.name}", self.path, "a folder")


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """The LoRA adapters. Without modules and root, nothing of LoRA is built.

    The adapter pool is device memory. ``memory_gib`` None: room for the ``max_loras`` largest of
    the modules; with ``root`` at least 1 GiB. All loaded adapters are in host memory as well.
    """

    modules: tuple[LoRAModule, ...] = ()  # loaded at start
    _: KW_ONLY
    max_loras: int | None = None  # that run at once; None: all modules, with ``root`` at least 8
    max_lora_rank: int | None = None  # a limit; graphs fit all adapters up to it
    memory_gib: float | None = None
    host_memory_gib: float = 16.0  # for all loaded adapters
    root: str | None = None  # the folder of adapters that may be loaded while serving

    def __post_init__(self) -> None:
        """Check that no name occurs twice, and the ranges. Raises ConfigError."""
        names = [module.name for module in self.modules]
        for name in names:
            _require(names.count(name) == 1, "LoRA adapter name", name, "used for one adapter")
        used = self.enabled
        limits = {"max_loras": self.max_loras, "max_lora_rank": self.max_lora_rank}
        for name, value in (*limits.items(), ("lora_memory_gib", self.memory_gib)):
            _require(value is None or used, name, value, "unset without lora_modules and lora_root")
            _require(value is None or value > 0, name, value, "above 0")
        _require(self.host_memory_gib > 0, "lora_host_memory_gib", self.host_memory_gib, "above 0")
        _require(self.root != "", "lora_root", self.root, "a folder")

    @property
    def enabled(self) -> bool:
        """Whether the model is built for adapters."""
        return bool(self.modules) or self.root is not None

    @property
    def num_slots(self) -> int:
        """How many adapters may run at once."""
        return self.max_loras or max(len(self.modules), 8 if self.root is not None else 0)


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding: how the tokens that may follow are guessed, with vLLM's names.

    ``method`` "ngram": where the last tokens of a request occur before in it, the tokens behind
    them there. It compares from ``prompt_lookup_max`` down to ``prompt_lookup_min`` tokens; each is
    the other's default, or 5. ``method`` None: there is none.
    """

    method: SpeculativeMethod | None = None
    _: KW_ONLY
    num_speculative_tokens: int = 0  # at most, of a request in one step
    prompt_lookup_max: int | None = None  # tokens
    prompt_lookup_min: int | None = None

    def __post_init__(self) -> None:
        """Check the choice and the ranges. Raises ConfigError."""
        method, drafts = self.method, self.num_speculative_tokens
        if method is None:
            for one in fields(self):
                value, name = getattr(self, one.name), f"speculative_config: {one.name}"
                _require(not value, name, value, "unset without method")
            return
        _require_one("speculative_config: method", method, SPECULATIVE_METHODS)
        limits = f"1 to {MAX_DRAFTS}"
        name = "speculative_config: num_speculative_tokens"
        _require(type(drafts) is int and 1 <= drafts <= MAX_DRAFTS, name, drafts, limits)
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            fine = value is None or (type(value) is int and 1 <= value <= MAX_LOOKUP)
            _require(fine, f"speculative_config: {name}", value, f"1 to {MAX_LOOKUP} tokens")
        least, most = self.lookup
        wanted = f"at most prompt_lookup_max, {most}"
        _require(least <= most, "speculative_config: prompt_lookup_min", least, wanted)

    @property
    def lookup(self) -> tuple[int, int]:
        """The fewest and the most tokens that are compared."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        return least or most or 5, most or least or 5


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Tensor parallelism: one model on several devices, a process for each.

    ``launcher``: Kiln starts the other ranks on this machine, or torchrun has started all.
    """

    tensor_parallel_size: int = 1
    _: KW_ONLY
    launcher: Literal["kiln", "torchrun"] = "kiln"

    def __post_init__(self) -> None:
        """Check the range. Raises ConfigError."""
        size = self.tensor_parallel_size
        _require(size >= 1, "tensor_parallel_size", size, "1 or more")


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What the engine's processes log to stderr: text, or one JSON object a line."""

    level: Literal["debug", "info", "warning", "error"] = "warning"
    format: Literal["text", "json"] = "text"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of the engine, grouped by component."""

    model: ModelConfig
    kv: KVConfig = field(default_factory=KVConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    logs: LogConfig = field(default_factory=LogConfig)
