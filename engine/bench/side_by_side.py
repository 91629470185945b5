"""Measure several engines on one model in one run, and report their rows together."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from kiln.engine.bench.engine import BenchError, Tell
from kiln.engine.bench.machine import versions
from kiln.engine.bench.report import Report, Row
from kiln.engine.config import EngineConfig
from kiln.engine.errors import KilnError
from kiln.engine.models.costs import bytes_read, keys_seen
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.registry import read_model
from kiln.engine.runner.device import resolve_device, resolve_dtype, resolve_kv_dtype
from kiln.jit_kernels.bench.ceilings import measure_ceilings


class Subject:
    """The measured model, with the settings that every engine gets. Raises ModelError."""

    def __init__(self, name: str, config: EngineConfig) -> None:
        self.name = name
        self.config = config
        given = config.model
        read = read_model(Path(given.model), given.quantization, given.overrides)
        self.model: HFConfig = read[1]
        self.device = resolve_device(config.model.device)
        self.dtype = resolve_dtype(config.model.dtype, self.model, self.device)
        self.kv_dtype = resolve_kv_dtype(config.kv.kv_cache_dtype, self.dtype)
        self.copy_bytes_s: float | None = None  # bytes read plus written per second

    def measure_machine(self, tell: Tell) -> None:
        """Measure the bandwidth of copies on a GPU. It must run before an engine fills the GPU."""
        tell("measuring the machine")
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                self.copy_bytes_s = measure_ceilings("cuda").copy_bytes_s
            gc.collect()
            torch.cuda.empty_cache()

    def floor_ms(self, num_requests: int, context: int) -> float | None:
        """Return the shortest time of a decode step in milliseconds; None on a CPU.

        It is the time of a copy that moves as many bytes as the step must read. With tensor
        parallelism each GPU reads its share of them.
        """
        read = decode_bytes(self.model, self.dtype, self.kv_dtype, num_requests, context)
        return self.copy_ms(read // self.config.parallel.tensor_parallel_size)

    def copy_ms(self, num_bytes: int) -> float | None:
        """Return the milliseconds of a copy that moves this many bytes; None on a CPU."""
        return None if self.copy_bytes_s is None else 1000 * num_bytes / self.copy_bytes_s

    def details(self) -> dict[str, Any]:
        """Return the facts about the subject that a report needs."""
        limits = asdict(self.config.scheduler) | {"max_model_len": self.config.model.max_model_len}
        if self.config.parallel.tensor_parallel_size > 1:
            limits["tensor_parallel_size"] = self.config.parallel.tensor_parallel_size
        for name in ("max_waiting", "scheduling_policy"):
            del limits[name]  # a queue has no effect on the speed
        measured: dict[str, Any] = {"threads": torch.get_num_threads()}
        if self.copy_bytes_s is not None:
            measured = {"copy_bytes_s": self.copy_bytes_s}
        return {
            "model": self.name,
            "load_format": self.config.model.load_format,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "kv_dtype": str(self.kv_dtype).removeprefix("torch."),
            "limits": limits,
            **measured,
        }


def decode_bytes(
    config: HFConfig, dtype: torch.dtype, kv_dtype: torch.dtype, num_requests: int, context: int
) -> int:
    """Return the bytes that a decode step of ``num_requests`` rows must read.

    These are the weights once, and the keys and values of ``context`` tokens per request. A layer
    with a window reads only the keys and values inside of it.
    """
    weights = bytes_read(config, dtype, num_requests)
    token_bytes = 2 * config.attention.kv_size * kv_dtype.itemsize  # in one layer
    return weights + num_requests * keys_seen(config, context) * token_bytes


@dataclass(slots=True)
class Measured:
    """The results of all engines. ``failure``: the error that ended the run early, if any."""

    rows: list[Row] = field(default_factory=list)
    load_seconds: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    failure: KilnError | None = None

    @property
    def remark(self) -> str:
        """What the title of the report must say: why the run ended early, if it did."""
        failed = "" if self.failure is None else str(self.failure).partition("\n")[0]
        return f"INCOMPLETE, {failed}" if failed else ""


class Loaded(Protocol):
    """A loaded engine, in this process or behind a server; see BenchEngine."""

    @property
    def load_seconds(self) -> float:
        """The time from the start to the first request."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Those of its packages, beside Kiln's."""

    def close(self) -> None:
        """Free the model's memory."""


E = TypeVar("E", bound=Loaded)


def measure_all(
    makers: Mapping[str, Callable[[], E]],
    measure: Callable[[E], Iterable[Row]],
    tell: Tell,
) -> Measured:
    """Measure one engine after the other; each is freed before the next one is loaded.

    An error before the first row is raised. A later one ends the run and is returned with the rows
    so far, so that minutes of measurements are not lost.
    """
    measured = Measured()
    for name, make in makers.items():
        tell(f"{name}: loading")
        try:
            with closing(make()) as engine:
                measured.load_seconds[name] = engine.load_seconds
                measured.versions |= engine.versions
                for row in measure(engine):  # rows before an error are kept
                    measured.rows.append(row)
        except Exception as error:  # a baseline may raise anything
            if not measured.rows:
                raise
            measured.failure = _as_kiln_error(name, error)
            break
    return measured


def make_report(
    benchmark: str, command: str, subject: Subject, measured: Measured, load: Mapping[str, Any]
) -> Report:
    """Return the report of a run."""
    about = subject.details() | {"load_seconds": measured.load_seconds}
    return Report(
        benchmark,
        command,
        measured.rows,
        load,
        about,
        remark=measured.remark,
        versions=versions() | measured.versions,
    )


def _as_kiln_error(name: str, error: Exception) -> KilnError:
    if isinstance(error, KilnError):
        return error
    failure = BenchError(f"{name}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
