"""The steps of a model as graphs: what is captured, and compared before it serves."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from kiln.cache.env import Env
from kiln.engine.attention import operator
from kiln.engine.attention.kernel_attention import KernelAttention
from kiln.engine.config import GraphConfig
from kiln.engine.distributed.group import Group
from kiln.engine.errors import ConfigError, DeviceError, KilnError, ModelError
from kiln.engine.graphs.buckets import decode_buckets, token_buckets
from kiln.engine.graphs.device import Between, CudaGraphs, GraphDevice
from kiln.engine.graphs.emulator import EmulatedGraphs
from kiln.engine.graphs.piecewise import LayersBetween
from kiln.engine.graphs.runner import LORA, CudaGraphRunner, GraphKey, Progress, decode_key
from kiln.engine.graphs.verify import Verification
from kiln.engine.kv.pool import KVPool
from kiln.engine.lora.batch_info import NO_ADAPTER
from kiln.engine.lora.operators import OPENED as LORA_OPERATORS
from kiln.engine.lora.runtime import Adapters
from kiln.engine.requests.batch import Batch
from kiln.engine.runner.failures import explained
from kiln.engine.runner.forward import ModelStep
from kiln.engine.runner.graph_check import GraphCheck

FEW_ROWS = 16
# Above, a step takes the GPU longer than its launches take the host, and padding costs more.
MOST_PREFILL_TOKENS = 512


def graph_device(config: GraphConfig, device: torch.device, env: Env) -> GraphDevice | None:
    """Return what captures graphs on a device; None if nothing should."""
    if not config.enabled:
        return None
    if device.type == "cuda":
        return CudaGraphs(device)
    if env.cpu_graphs != "emulate":
        return None
    return EmulatedGraphs({operator.attention: operator.run, **LORA_OPERATORS})


def graph_keys(config: GraphConfig, rows: int, tokens: int, prefill: str) -> tuple[GraphKey, ...]:
    """Return the sizes to capture, for steps of at most so many rows and tokens.

    ``prefill``: KILN_GRAPH_PREFILL. Steps with prefills are captured for few rows and for all, as
    the language model's head runs for every row. Raises ConfigError.
    """
    decode = tuple(decode_key(size) for size in _decode_sizes(config, min(rows, tokens)))
    if prefill == "off":
        return decode
    sizes = token_buckets(min(tokens, MOST_PREFILL_TOKENS))
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


class StepGraphs:
    """The graphs of a model's steps. ``runner`` is None if there are none.

    Attention that plans on the host, and with KILN_GRAPH_PREFILL=piecewise that of steps with
    prefills, runs between the pieces of a graph.
    """

    def __init__(
        self,
        step: ModelStep,
        config: GraphConfig,
        keys: Sequence[GraphKey],
        env: Env,
        device: GraphDevice | None,
        group: Group,
        adapters: Adapters | None = None,
    ) -> None:
        self._group = group
        self._sums: dict[GraphKey, Mapping[str, int]] = {}  # of a replay, by algorithm
        self.verification = Verification.parse(env.graph_verify)
        self._step = step
        self._strict = env.graph_strict
        self._shadowed = 0
        self.runner: CudaGraphRunner | None = None
        if device is None:
            return
        captures_attention = isinstance(step.attention, KernelAttention)
        captures_prefills = captures_attention and env.graph_prefill == "full"
        self._whole = {
            key for key in keys if (captures_attention if key.is_decode else captures_prefills)
        }
        self._between = LayersBetween(step.layers, device.keep)
        self._adapters = adapters if adapters is not None and adapters.reserve_graphs() else None
        if self._adapters is not None:  # graphs of the base model contain nothing of LoRA
            adapted = {key: key._replace(variant=LORA) for key in keys}
            self._whole |= {adapted[key] for key in self._whole}
            keys = (*keys, *adapted.values())
        self.runner = CudaGraphRunner(
            self._captured,
            keys,
            device,
            step.inputs.addresses,
            garbage_collection=config.garbage_collection,
            # Of several ranks none may go on alone, as the others wait for its sums.
            strict=env.graph_strict or group.size > 1,
            agree=group.minimum,
        )
        group.before_close(self.runner.free_later())

    @torch.inference_mode()
    def measure(self) -> int:
        """Return about how many bytes of GPU memory the graphs take."""
        if self.runner is None or self._step.device.type != "cuda":
            return 0
        self._clear_inputs()
        with self._captures():
            return self.runner.measure(self._free_bytes)

    @torch.inference_mode()
    def capture(self, pool: KVPool, progress: Progress) -> None:
        """Capture every size and compare graphs with eager steps. Nobody uses the pool yet.

        A size that differs runs without a graph. Raises ModelError if KILN_GRAPH_STRICT is set.
        """
        if self.runner is None:
            return
        free, begun = self._free_bytes(), time.perf_counter()
        self._clear_inputs()
        with self._captures():
            self.runner.capture(progress)
        counts = self.runner.counts
        counts.captured = len(self.runner.keys)
        counts.seconds = time.perf_counter() - begun
        counts.num_bytes = free - self._free_bytes()
        groups = self._groups()
        slots = (*next(groups), NO_ADAPTER)
        check = GraphCheck(self._step, pool, self._eager, self._replay, slots)
        cases = list(self.verification.cases(self.runner.keys))
        for done, (key, tokens) in enumerate(cases):
            progress("verifying graphs", done, len(cases))
            if key in self.runner.keys:
                self._judge(key, self._difference(check, key, tokens))
        if cases:
            progress("verifying graphs", len(cases), len(cases))
        deque(groups, maxlen=0)  # leave an empty pool
        self.runner.counts.replays.clear()  # only steps of requests are counted

    def replay(self, key: GraphKey, batch: Batch, used: int) -> torch.Tensor:
        """Run the graph of a size for a batch that samples ``used`` tokens; return its logits.

        One of ``verification.every`` steps is also run eagerly, and the results are compared.
        Raises DeviceError if they differ and KILN_GRAPH_STRICT is set.
        """
        every = self.verification.every
        self._shadowed += 1
        if not every or self._shadowed % every:
            return self._replay(key, batch)
        inputs = self._step.inputs
        before = inputs.sampled.clone()  # what the step reads, and then overwrites
        logits = self._replay(key, batch)[:used].clone()
        tokens = inputs.sampled[:used].clone()
        inputs.sampled.copy_(before)
        eager = self._eager(key, batch)
        same = torch.equal(tokens, inputs.sampled[:used]) and torch.equal(logits, eager[:used])
        # While serving only a DeviceError ends the process; others are errors of requests.
        self._judge(key, "" if same else "its results differ from an eager step's", DeviceError)
        return eager

    @contextmanager
    def _captures(self) -> Iterator[None]:
        """Turn a failed capture into an error with advice if there are several ranks.

        One rank alone cannot go on without a graph, as the others wait for its sums.
        """
        try:
            with explained(self._step.device, "capturing CUDA graphs"):
                yield
        except KilnError:
            raise
        except Exception as error:
            if self._group.size == 1:
                raise
            reason = f"{error}".partition("\n")[0]
            raise ModelError(
                f"a CUDA graph cannot be captured: {reason}; with tensor parallelism every graph "
                "must be captured: use --disable-cuda-graph"
            ) from error

    def _clear_inputs(self) -> None:
        """Let a capture see padding alone: a smaller size reads other places than the last step."""
        self._step.inputs.clear()
        if self._adapters is not None:
            self._adapters.clear()

    def _groups(self) -> Iterator[Iterable[int]]:
        """Yield groups of adapter slots; the adapters of each are in the pool meanwhile."""
        if self._adapters is None:
            return iter([()])
        return self._adapters.groups(self._adapters.store.num_slots)

    def can_run(self, batch: Batch) -> str:
        """Return why a batch cannot run in a graph; "" if it can."""
        assert self.runner is not None
        if batch.reports_prompts:
            return "log-probabilities of a prompt"
        if batch.has_adapters:
            if self._adapters is None:
                return "a LoRA adapter"
            if not self._adapters.fit(batch):
                return "a LoRA adapter with more ranks than graphs have room for"
        return self.runner.can_run(batch)

    def _capture(self, key: GraphKey, between: Between) -> torch.Tensor:
        if self._adapters is None or not key.variant:
            return self._run(key, between)
        with self._adapters.fixed_step(key.tokens, key.rows):
            return self._run(key, between)

    def _captured(self, key: GraphKey, between: Between) -> torch.Tensor:
        """Run a step that may be captured; on a GPU, keep how many sums a replay will do."""
        before = Counter(self._group.stats())
        with self._group.capture():
            logits = self._capture(key, between)
        if self._step.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._sums[key] = Counter(self._group.stats()) - before
            self._group.uncount(self._sums[key])
        return logits

    def _run(self, key: GraphKey, between: Between) -> torch.Tensor:
        if key in self._whole:
            return self._step.whole(key)
        return self._step.prepared(key, self._between.layers(between))

    def _prepare(self, key: GraphKey, batch: Batch) -> None:
        """Set what a graph needs besides the message."""
        if self._adapters is not None and key.variant:
            self._adapters.fill(batch, key.tokens, key.rows)
        if key not in self._whole:
            self._between.begin(self._step.prepare(key, batch))

    def _replay(self, key: GraphKey, batch: Batch) -> torch.Tensor:
        assert self.runner is not None
        self._prepare(key, batch)
        self._group.count(self._sums.get(key, {}))
        return self.runner.replay(key)

    def _eager(self, key: GraphKey, batch: Batch) -> torch.Tensor:
        """Do the same without a graph."""
        self._prepare(key, batch)
        return self._capture(key, lambda call: call())

    def _free_bytes(self) -> int:
        """Return the free memory of the GPU; 0 on a CPU."""
        device = self._step.device
        if device.type != "cuda":
            return 0
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]

    def _judge(self, key: GraphKey, difference: str, error: type[KilnError] = ModelError) -> None:
        assert self.runner is not None
        if not self._group.minimum([not difference])[0]:
            difference = difference or "on another rank it differs from an eager step"
        if not difference:
            return
        if self._strict:
            raise error(f"the CUDA graph of {key}: {difference} (KILN_GRAPH_STRICT=1)")
        self.runner.drop(key, difference)

    def _difference(self, check: GraphCheck, key: GraphKey, tokens: int) -> str:
        """Return how a graph differs. One without memory for the comparison is not used either."""
        try:
            return check.difference(key, tokens)
        except torch.OutOfMemoryError:
            if self._group.size > 1:  # the other ranks wait for the sums of this one
                raise
            return "out of memory"
