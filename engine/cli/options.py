"""The flags of the engine's settings, shared by the commands that start an engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kiln.engine.config import (
    KV_CACHE_DTYPES,
    EngineConfig,
    GraphConfig,
    KVConfig,
    LoRAConfig,
    LoRAModule,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from kiln.engine.errors import ConfigError, ModelError

DEMO_FOLDER = Path(__file__).parents[1] / "demo"
_MODEL_FLAGS = ("dtype", "device", "load_format", "max_model_len", "seed")
_KV_FLAGS = ("block_size", "gpu_memory_utilization", "kv_memory_gib", "kv_cache_dtype")
_SCHEDULER_FLAGS = ("max_num_seqs", "max_num_batched_tokens", "max_chunk_tokens", "max_waiting")
_GRAPH_FLAGS = {"cuda_graph_max_bs": "max_bs", "cuda_graph_bs": "bs"}
_LORA_FLAGS = {
    "max_loras": "max_loras",
    "max_lora_rank": "max_lora_rank",
    "lora_memory_gib": "memory_gib",
    "lora_host_memory_gib": "host_memory_gib",
    "lora_root": "root",
}
_SWITCHES = ("disable_overlap_schedule", "disable_cuda_graph", "enable_cudagraph_gc")
ENGINE_FLAGS = (
    *_MODEL_FLAGS, *_KV_FLAGS, "num_kv_blocks", *_SCHEDULER_FLAGS, *_GRAPH_FLAGS, *_SWITCHES,
    "tensor_parallel_size",
)  # fmt: skip


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and one flag per setting of ``kiln.engine.config``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=str(DEMO_FOLDER),
        help="folder in Hugging Face format, or a hub id; default: the demo model",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--dtype", choices=("auto", "float32", "float16", "bfloat16"))
    model.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    model.add_argument(
        "--load-format", choices=("auto", "dummy"), help="dummy: random weights of the right shapes"
    )
    model.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="context; default: the model's"
    )
    model.add_argument("--seed", type=int, help="for requests without one; default: random")
    model.add_argument(
        "--tp",
        "--tensor-parallel-size",
        dest="tensor_parallel_size",
        type=int,
        metavar="N",
        help="share the model among N GPUs of this machine, or N processes on a CPU; default 1, "
        "under torchrun the number of its processes",
    )
    kv = parser.add_argument_group("KV pool")
    kv.add_argument("--block-size", type=int, metavar="TOKENS", help="default 16")
    kv.add_argument("--num-kv-blocks", type=int, metavar="N", help="default: by memory size")
    kv.add_argument("--kv-memory-gib", type=float, metavar="GIB", help="size on a CPU; default 1")
    kv.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="fraction of the GPU's memory that Kiln may use; default 0.9",
    )
    kv.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        help="8-bit floats store twice the tokens; default: the model's dtype",
    )
    _add_scheduler_arguments(parser)
    _add_graph_arguments(parser)


def _add_scheduler_arguments(parser: argparse.ArgumentParser) -> None:
    scheduler = parser.add_argument_group("scheduler")
    scheduler.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="running requests; default 256 on a GPU, 64 on a CPU",
    )
    scheduler.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="token budget; default 2048"
    )
    scheduler.add_argument(
        "--max-chunk-tokens", type=int, metavar="N", help="longest chunk of one prefill"
    )
    scheduler.add_argument(
        "--max-waiting", type=int, metavar="N", help="queued requests; default 1024, then 503"
    )
    scheduler.add_argument(
        "--disable-overlap-schedule",
        action="store_true",
        help="launch a step only after the tokens of the one before are known",
    )


def _add_graph_arguments(parser: argparse.ArgumentParser) -> None:
    graphs = parser.add_argument_group("CUDA graphs")
    graphs.add_argument(
        "--disable-cuda-graph", action="store_true", help="launch each kernel of a decode step"
    )
    graphs.add_argument(
        "--cuda-graph-max-bs",
        type=int,
        metavar="N",
        help="largest batch size to capture; default: max-num-seqs",
    )
    graphs.add_argument(
        "--cuda-graph-bs",
        type=int,
        nargs="+",
        metavar="N",
        help="batch sizes to capture; default: about 30, an eighth apart",
    )
    graphs.add_argument(
        "--enable-cudagraph-gc",
        action="store_true",
        help="keep Python's garbage collector on during the capture, which takes longer",
    )


def add_lora_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of LoRA adapters."""
    lora = parser.add_argument_group("LoRA adapters")
    lora.add_argument(
        "--lora-modules",
        nargs="+",
        metavar="NAME=PATH",
        help="adapters in PEFT's format to load at start; a request names one as its model",
    )
    lora.add_argument(
        "--lora-root",
        metavar="DIR",
        help="allow clients to load and unload adapters while serving, from folders inside DIR",
    )
    lora.add_argument(
        "--max-loras",
        type=int,
        metavar="N",
        help="adapters that run at once; requests of more wait for their turn. "
        "Default: all of --lora-modules, with --lora-root at least 8",
    )
    lora.add_argument(
        "--max-lora-rank",
        type=int,
        metavar="N",
        help="refuse larger ranks; graphs fit all up to it",
    )
    lora.add_argument(
        "--lora-memory-gib",
        type=float,
        metavar="GIB",
        help="device memory for adapters, each of which takes that of its own ranks. Default: room "
        "for the N largest of --lora-modules, N as in --max-loras; with --lora-root at least 1",
    )
    lora.add_argument(
        "--lora-host-memory-gib",
        type=float,
        metavar="GIB",
        help="host memory, for all loaded adapters; default 16",
    )


def engine_config(args: argparse.Namespace, folder: Path) -> EngineConfig:
    """Return the flags as a configuration of the model in ``folder``. Raises ConfigError.

    A setting whose flag is not given keeps its default.
    """
    model = _given(args, *_MODEL_FLAGS, "served_model_name")
    kv = _given(args, *_KV_FLAGS, num_kv_blocks="num_blocks")
    scheduler = _given(args, *_SCHEDULER_FLAGS)
    graphs = _given(args, **_GRAPH_FLAGS)
    if "bs" in graphs:
        graphs["bs"] = tuple(graphs["bs"])
    return EngineConfig(
        ModelConfig(str(folder), **model),
        KVConfig(**kv),
        SchedulerConfig(**scheduler, overlap=not args.disable_overlap_schedule),
        GraphConfig(
            enabled=not args.disable_cuda_graph,
            garbage_collection=args.enable_cudagraph_gc,
            **graphs,
        ),
        LoRAConfig(lora_modules(args), **_given(args, **_LORA_FLAGS)),
        ParallelConfig(**_given(args, "tensor_parallel_size")),
    )


def lora_modules(args: argparse.Namespace) -> tuple[LoRAModule, ...]:
    """Return the adapters of ``--lora-modules``, a flag of some commands. Raises ConfigError."""
    modules = []
    for given in getattr(args, "lora_modules", None) or ():
        name, equals, path = given.partition("=")
        if not equals:
            raise ConfigError(f"--lora-modules {given[:80]!r}: want NAME=PATH")
        modules.append(LoRAModule(name, path))
    return tuple(modules)


def served_name(args: argparse.Namespace) -> str:
    """Return the served model name: the flag, else the folder's name or the hub id."""
    given = getattr(args, "served_model_name", None)
    if given:
        return str(given)
    path = Path(args.model).expanduser()
    return path.resolve().name if path.is_dir() else str(args.model)


def find_model(args: argparse.Namespace) -> Path:
    """Return the model's folder; download a hub id. Raises ModelError."""
    from kiln.engine.models.model_folder import resolve_model_folder

    if args.model == str(DEMO_FOLDER) and not (DEMO_FOLDER / "config.json").exists():
        raise ModelError(f"{DEMO_FOLDER}: the demo model is missing; give a model folder")
    return resolve_model_folder(args.model)


def engine_flags(args: argparse.Namespace) -> list[str]:
    """Return MODEL and the given flags, as a command line for another ``kiln``."""
    flags = [str(args.model)]
    for name in ENGINE_FLAGS:
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        elif value is not None and value is not False:
            flags += [flag, str(value)]
    return flags


def _given(args: argparse.Namespace, *same: str, **renamed: str) -> dict[str, Any]:
    names = {**{name: name for name in same}, **renamed}
    values = {own: getattr(args, flag, None) for flag, own in names.items()}
    return {name: value for name, value in values.items() if value is not None}
