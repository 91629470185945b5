"""Capture the graphs of steps, measure their memory, and compare them before they serve."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kiln.cache.env import Env
from kiln.engine.attention import operator
from kiln.engine.config import GraphConfig
from kiln.engine.errors import ConfigError, KilnError, ModelError
from kiln.engine.graphs.buckets import decode_buckets, token_buckets
from kiln.engine.graphs.device import CudaGraphs, GraphDevice
from kiln.engine.graphs.emulator import EmulatedGraphs
from kiln.engine.graphs.runner import GraphKey, Progress, decode_key
from kiln.engine.graphs.verify import Verification
from kiln.engine.kv.pool import KVPool
from kiln.engine.lora.batch_info import NO_ADAPTER
from kiln.engine.lora.operators import OPENED as LORA_OPERATORS
from kiln.engine.runner.executor import Executor
from kiln.engine.runner.failures import explained
from kiln.engine.runner.graph_check import GraphCheck

FEW_ROWS = 16
MOST_PREFILL_TOKENS = 512  # of steps in graphs, where nothing says more


def graph_device(config: GraphConfig, device: torch.device, env: Env) -> GraphDevice | None:
    """Return what captures graphs on a device; None if nothing should."""
    if not config.enabled:
        return None
    if device.type == "cuda":
        return CudaGraphs(device)
    if env.cpu_graphs != "emulate":
        return None
    return EmulatedGraphs({operator.attention: operator.run, **LORA_OPERATORS})


def graph_keys(
    config: GraphConfig,
    rows: int,
    tokens: int,
    prefill: str,
    drafts: int = 0,
    most_prefill: int = MOST_PREFILL_TOKENS,
) -> tuple[GraphKey, ...]:
    """Return the sizes to capture, for steps of at most so many rows and tokens.

    ``prefill``: KILN_GRAPH_PREFILL. ``drafts``: of a row, in decode steps that have any.
    ``most_prefill``: most tokens of a step with prefills. These are captured for few rows and for
    all, as the language model's head runs for every row. Raises ConfigError.
    """
    rows = min(rows, tokens)  # each row has a token
    sizes = _decode_sizes(config, rows)
    decode = tuple(decode_key(size) for size in sizes)
    if drafts:
        decode += tuple(decode_key(size, drafts) for size in sizes if size * (1 + drafts) <= tokens)
    if prefill == "off":
        return decode
    sizes = token_buckets(min(tokens, most_prefill))
    return decode + tuple(
        GraphKey(size, most, is_decode=False)
        for most in sorted({min(FEW_ROWS, rows), rows})
        for size in sizes
        if most > 1
    )


def _decode_sizes(config: GraphConfig, most: int) -> tuple[int, ...]:
    for name, largest in (
        ("cuda_graph_max_bs", config.max_bs or 0),
        ("cuda_graph_bs", max(config.bs or (0,))),
    ):
        if largest > most:
            raise ConfigError(
                f"{name}: {largest} rows, but a step has at most {most} (max_num_seqs and "
                "max_num_batched_tokens): raise these or lower it"
            )
    return tuple(sorted(set(config.bs))) if config.bs else decode_buckets(config.max_bs or most)


@torch.inference_mode()
def measure_graphs(executor: Executor) -> int:
    """Return about how many bytes of GPU memory the graphs take."""
    graphs, device = executor.graphs, executor.step.device
    if graphs is None or device.type != "cuda":
        return 0
    executor.step.clear()
    with _captures(executor):
        return graphs.measure(executor.record, lambda: _free_bytes(device))


@torch.inference_mode()
def capture_graphs(
    executor: Executor, pool: KVPool, verification: Verification, progress: Progress
) -> None:
    """Capture every size and compare graphs with eager steps. Nobody uses the pool yet.

    A size that differs runs without a graph. Raises ModelError if KILN_GRAPH_STRICT is set.
    """
    graphs, device = executor.graphs, executor.step.device
    if graphs is None:
        return
    free, begun = _free_bytes(device), time.perf_counter()
    executor.step.clear()
    with _captures(executor):
        graphs.capture(executor.record, progress)
    counts = graphs.counts
    counts.captured = len(graphs.keys)
    counts.seconds = time.perf_counter() - begun
    counts.num_bytes = free - _free_bytes(device)
    adapters, groups = executor.step.graph_adapters, iter([dict[int, str]()])
    if adapters is not None:
        groups = adapters.groups(adapters.store.num_slots)
    check = GraphCheck(executor, pool, (*next(groups), NO_ADAPTER))
    cases = list(verification.cases(graphs.keys))
    for done, (key, tokens) in enumerate(cases):
        progress("verifying graphs", done, len(cases))
        if key in graphs.keys:
            executor.judge(key, _difference(executor, check, key, tokens))
    if cases:
        progress("verifying graphs", len(cases), len(cases))
    deque(groups, maxlen=0)  # leave an empty pool
    counts.replays.clear()  # only steps of requests are counted


@contextmanager
def _captures(executor: Executor) -> Iterator[None]:
    """Turn a failed capture into an error with advice if there are several ranks.

    One rank alone cannot go on without a graph, as the others wait for its sums.
    """
    try:
        with explained(executor.step.device, "capturing CUDA graphs"):
            yield
    except KilnError:
        raise
    except Exception as error:
        if executor.group.size == 1:
            raise
        reason = f"{error}".partition("\n")[0]
        raise ModelError(
            f"a CUDA graph cannot be captured: {reason}; with tensor parallelism every graph "
            "must be captured: use --disable-cuda-graph"
        ) from error


def _difference(executor: Executor, check: GraphCheck, key: GraphKey, tokens: int) -> str:
    """Return how a graph differs. One without memory for the comparison is not used either."""
    try:
        return check.difference(key, tokens)
    except torch.OutOfMemoryError:
        if executor.group.size > 1:  # the other ranks wait for the sums of this one
            raise
        return "out of memory"


def _free_bytes(device: torch.device) -> int:
    """Return the free memory of the GPU; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
