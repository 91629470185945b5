"""Compile every kernel ahead of time, for any GPU, on any machine.

With --model and KILN_COMPILE also the pieces of the model, for the device of this machine.

With --tune or --tune-comm measure instead, on this machine's GPUs, what engines to come choose by.

Exit codes: 0 success, 1 flags that exclude each other or nothing to measure on, 3 the cache is
sealed and lacks a kernel, 5 a kernel did not compile.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kiln.engine.cli import exit_codes
from kiln.engine.cli.engine_flags import MODEL
from kiln.engine.cli.flags import add_group, command_line, group_of
from kiln.engine.cli.options import model_config
from kiln.engine.cli.targets import add_arch_argument, compiled_archs
from kiln.engine.config import KV_CACHE_DTYPES, ModelConfig

if TYPE_CHECKING:
    from kiln.engine.models.family import Family
    from kiln.engine.models.hf_config import HFConfig
    from kiln.jit_kernels.compile.warmup import Job

_SETTINGS = group_of(
    "with --model: what it will be served with",
    MODEL,
    *("--revision", "--hf-overrides", "--dtype", "--quantization"),
)
HELP = "compile every kernel into the kernel cache; needs no GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_arch_argument(parser)
    parser.add_argument(
        "--model",
        help="only kernels of this model, and its pieces if KILN_COMPILE is set: a folder in "
        "Hugging Face format, or a hub id",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="with --model: dtype of the KV cache that it will be served with",
    )
    parser.add_argument(
        "--jobs", type=int, help="parallel compiles; default: KILN_JIT_JOBS, else the cores"
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="with --model: measure its products of few rows on this machine's first GPU instead, "
        "by Kiln's kernel and by torch, and keep what is fastest for engines to come",
    )
    parser.add_argument(
        "--tune-comm",
        action="store_true",
        help="measure the sums over --tp ranks on this machine's devices instead, and keep what is "
        "fastest for engines to come",
    )
    parser.add_argument(
        "--tp", "--tensor-parallel-size", dest="tensor_parallel_size", type=int, metavar="N",
        help="ranks of --tune-comm; with --model, also the kernels that sum over N ranks; with "
        "--tune, the products of one of N ranks",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="list the programs, compile nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no progress")
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="also write these kernels to a sealed bundle"
    )
    add_group(parser, _SETTINGS)


def run(args: argparse.Namespace) -> int:
    """Compile, and print the outcome."""
    from kiln.jit_kernels.compile.warmup import jobs_for
    from kiln.jit_kernels.declare.errors import KernelError
    from kiln.jit_kernels.registry import all_specs

    if args.jobs is not None and args.jobs < 1:
        raise KernelError(f"--jobs {args.jobs}: want 1 or more")
    if args.tune_comm or args.tune:
        _check_tuning(args)
        return _tune_sums(args) if args.tune_comm else _tune_products(args)
    if args.tensor_parallel_size is not None and args.model is None:
        raise KernelError("--tp needs --tune-comm or --model: without a model all are built")
    if args.kv_cache_dtype != "auto" and args.model is None:
        raise KernelError("--kv-cache-dtype needs --model: without one all kernels are built")
    for flag in command_line(args, [_SETTINGS])[:1]:
        if args.model is None:
            raise KernelError(f"{flag} needs --model: without one all kernels are built")
    archs = compiled_archs(args.arch)
    if args.model is None:
        jobs = jobs_for(all_specs().values(), archs)
    else:
        jobs = _jobs_of(args, args.tensor_parallel_size or 1, archs)
    if args.dry_run:
        names = [job.name for job in jobs]
        print(
            json.dumps({"kernels": len(names), "names": names}) if args.json else "\n".join(names)
        )
        return exit_codes.OK
    return _build(jobs, args)


def _check_tuning(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that have no effect on a measurement."""
    from kiln.engine.errors import ConfigError

    name, others = "--tune", {"--tune-comm": args.tune_comm}
    if args.tune_comm:
        name, others = "--tune-comm", {"--tune": args.tune, "--model": args.model}
    others |= {"--dry-run": args.dry_run, "--export": args.export, "--arch": args.arch}
    others |= {"--jobs": args.jobs, "--kv-cache-dtype": args.kv_cache_dtype != "auto"}
    given = [flag for flag, value in others.items() if value]
    if args.tune_comm:
        given += command_line(args, [_SETTINGS])[:1]
    if given:
        raise ConfigError(f"{name} measures instead of compiling: leave out {', '.join(given)}")
    if args.tune and args.model is None:
        raise ConfigError("--tune needs --model: it measures the products of a model")


def _tune_sums(args: argparse.Namespace) -> int:
    """Measure the all-reduce instead. Raises ConfigError and DeviceError."""
    from kiln.engine.cli.tuning import tune_sums

    tune_sums(args.tensor_parallel_size, as_json=args.json)
    return exit_codes.OK


def _tune_products(args: argparse.Namespace) -> int:
    """Measure the products of few rows instead. Raises ModelError, ConfigError and KernelError."""
    from kiln.engine.cli.product_tuning import gpu_to_measure, tune_products
    from kiln.engine.runner.device import resolve_dtype

    device, model = gpu_to_measure(), _read(args)
    dtype = resolve_dtype(_settings(args).dtype, model[1], device)
    world = 1 if args.tensor_parallel_size is None else args.tensor_parallel_size
    tune_products(model, dtype, device, world, as_json=args.json)
    return exit_codes.OK


def _jobs_of(args: argparse.Namespace, world: int, archs: Sequence[str]) -> list[Job]:
    """Return the programs that a model on some ranks can call, with LoRA adapters or without.

    Raises ModelError and ConfigError.
    """
    import torch

    from kiln.engine.distributed.peers import sum_kernels
    from kiln.engine.models.kernel_needs import kernel_needs
    from kiln.engine.runner.device import resolve_dtype, resolve_kv_dtype
    from kiln.engine.runner.kernels import called_kernels
    from kiln.jit_kernels.compile.warmup import jobs_for

    model, device = _read(args), torch.device("cuda")
    config = model[1]
    dtype = resolve_dtype(_settings(args).dtype, config, device)
    needs = kernel_needs(config, dtype, resolve_kv_dtype(args.kv_cache_dtype, dtype))
    sums, sizes = sum_kernels(world, device)
    jobs = jobs_for(called_kernels(None, model, device, needs), archs, needs)
    return jobs + jobs_for(sums, archs, {**needs, **sizes})


def _read(args: argparse.Namespace) -> tuple[Family, HFConfig]:
    """Read the config.json of --model. Raises ModelError and ConfigError."""
    from kiln.engine.models.model_folder import resolve_model_folder
    from kiln.engine.models.registry import read_model

    model = _settings(args)
    folder = resolve_model_folder(model.model, model.revision)
    return read_model(folder, model.quantization, model.overrides)


def _settings(args: argparse.Namespace) -> ModelConfig:
    return model_config(args, args.model, _SETTINGS)


def _build(jobs: list[Job], args: argparse.Namespace) -> int:
    from kiln.cache.disk.prune import prune_all
    from kiln.engine.cli.kernel_progress import build_with_progress, summarise
    from kiln.jit_kernels.compile.bundling import export_bundle
    from kiln.jit_kernels.compile.open_cache import kernel_cache
    from kiln.jit_kernels.declare.errors import SealedMiss
    from kiln.jit_kernels.declare.settings import settings

    cache = kernel_cache()
    outcomes, seconds = build_with_progress(jobs, cache, args.jobs, quiet=args.json)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    pieces = {} if errors or args.model is None else _build_pieces(args)
    summarise(outcomes, seconds, errors, cache, more=pieces, as_json=args.json)
    if any(isinstance(error, SealedMiss) for error in errors):
        return exit_codes.SEALED_MISS
    if errors:
        return exit_codes.COMPILE_FAILED
    if cache.store.writes:  # here no request waits for the pruning
        env = settings()
        prune_all(env, env.kernel_cache_max_mb, env.kernel_cache_max_days)
    if args.export is not None:
        done = export_bundle(args.export, jobs, cache)
        if not args.json:
            print(f"{args.export}: {done.written} kernels, sha256 {done.sha256}")
    return exit_codes.OK


def _build_pieces(args: argparse.Namespace) -> dict[str, Any]:
    """Build the pieces of --model for --tp ranks as KILN_COMPILE says; return counts to report.

    Raises ModelError, PieceError and SealedCacheError.
    """
    from kiln.jit_kernels.declare.settings import settings

    env = settings()
    if env.compile == "off":
        return {}
    from kiln.engine.cli.progress import LoadingDisplay
    from kiln.engine.compile.ahead import build_ahead
    from kiln.engine.distributed.group import group_name
    from kiln.engine.models.split import Split
    from kiln.engine.runner.device import resolve_device, resolve_dtype

    family, config = _read(args)
    device = resolve_device("auto")
    dtype = resolve_dtype(_settings(args).dtype, config, device)
    start, world = time.perf_counter(), args.tensor_parallel_size or 1
    ranks = [Split(rank, world, group_name(world)) for rank in range(world)]
    with closing(LoadingDisplay(quiet=args.json)) as display:
        ahead = build_ahead(family, config, dtype, device, env, display, ranks)
    return {
        "pieces": ahead.pieces,
        "piece_artefacts_built": ahead.built,
        "piece_seconds": round(time.perf_counter() - start, 3),
        "piece_compiler": env.compile,
        "piece_device": str(device),
    }
