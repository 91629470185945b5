"""What LoRA adapters cost a decode step, by their number, in one engine or two side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from kiln.engine.bench import latency
from kiln.engine.bench.engine import BenchEngine, Tell
from kiln.engine.bench.latency import SHORT_RUN, LatencyLoad
from kiln.engine.bench.report import Report, Row, over, table, with_ratio

_COLUMNS = {
    "engine": "{engine}",
    "requests": "{batch_size}",
    "adapters": "{shown}",
    "ms a step": "{step_ms:.3f}",
    "growth": "{growth:+.1%}",
    "floor of the growth": "{growth_floor:+.1%}",
    "output tokens/s": "{output_tokens_per_s:,.0f}",
    "GPU busy, ms": "{device_ms:.3f}",
    "kernels a step": "{device_launches:,.0f}",
    "Kiln's speed over this": "{ratio:.2f}×",
}


@dataclass(frozen=True, slots=True)
class LoRALoad:
    """Batches of requests that use some number of distinct adapters, in turn.

    ``adapters``: these numbers; with 0 an engine has adapters, and no request uses one. ``rank``:
    of every adapter. A number above a batch size is left out there.
    """

    adapters: tuple[int, ...] = (0, 1, 8)
    rank: int = 16
    batch_sizes: tuple[int, ...] = (1, 64)
    prompt_tokens: int = 128
    output_tokens: int = 128

    @property
    def steps(self) -> LatencyLoad:
        """The batches, without adapters."""
        return LatencyLoad(self.batch_sizes, self.prompt_tokens, self.output_tokens)

    @property
    def most(self) -> int:
        """How many adapters an engine must have, at least one; 0 if no batch has enough rows."""
        fit = [number for number in self.adapters if number <= max(self.batch_sizes)]
        return max(1, *fit) if fit else 0

    def with_room(self, number: int) -> LatencyLoad | None:
        """Return the batches in which this many adapters can be used, if there are any."""
        sizes = tuple(size for size in self.batch_sizes if size >= number)
        return replace(self.steps, batch_sizes=sizes) if sizes else None


def measure(engine: BenchEngine, load: LoRALoad, vocab_size: int, tell: Tell) -> Iterator[Row]:
    """Yield a row per number of adapters and batch size, with ``latency``'s fields.

    ``adapters`` is the number, or None in an engine without adapters, which has one row per batch
    size. Raises BenchError.
    """
    for number in load.adapters if engine.adapters else (None,):
        steps = load.with_room(number or 0)
        if steps is None:
            continue
        for row in latency.measure(engine, steps, vocab_size, tell, number or 0):
            of_lora = {"engine": engine.product, "adapters": number}
            if engine.adapters:
                of_lora["lora_backend"] = engine.lora_backend
            yield {**row, **of_lora}


def complete(rows: Iterable[Row], floor_ms: Callable[[int], float | None]) -> list[Row]:
    """Return the rows in order of batch size, with the fields that are computed from them.

    ``floor_ms``: the time of reading a number of adapters. ``growth``: how much longer a step is
    than that of the same engine without adapters, as a part of the latter. ``growth_floor``: what
    it would be if the adapters cost only the reading. ``ratio``: see
    ``with_ratio``.
    """
    rows = with_ratio(rows, "batch_size", "adapters")
    alone = {
        (row["engine"], row["batch_size"]): row["step_ms"]
        for row in rows
        if row["adapters"] is None
    }
    done = []
    for row in sorted(rows, key=lambda row: int(row["batch_size"])):
        number, base = row["adapters"], alone.get((row["engine"], row["batch_size"]))
        floor = None if number is None else floor_ms(number)
        grown = over(row["step_ms"], base)
        growth = None if number is None or grown is None else grown - 1
        found = {"growth": growth, "growth_floor": over(floor, base)}
        done.append({**row, "device_ms": row.get("device_ms"), **found})
    return done


def markdown(report: Report) -> str:
    """Return the report's page."""
    load, details = report.load, report.details
    text = (
        f"Requests of {load['prompt_tokens']} random tokens, greedy, all in every step, which use "
        f"the adapters in turn; each adapter has rank {load['rank']} on all projections of "
        f"attention and MLP, {load['adapter_bytes'] / 1e6:,.1f} MB in {details['dtype']}. A "
        f"step is the difference between runs of {SHORT_RUN + load['output_tokens']} and "
        f"{SHORT_RUN} new tokens over {load['output_tokens']}, each the best of "
        f"{latency.REPEATS}. Adapters: how many differ in a step. Without: the engine is built "
        f"for none. 0: it has {load['num_adapters']}, and no request uses one. Growth: over the "
        "step of the same engine without."
    )
    copied = details.get("copy_bytes_s")
    if copied:
        text += (
            " Floor of the growth: the bytes of the adapters in use, at the "
            f"{copied / 1e12:.2f} TB/s that copies reach on this GPU. GPU busy: the union of its "
            "kernels and copies under torch's profiler. Kernels a step: those and the copies."
        )
    backends = {row["engine"]: row["lora_backend"] for row in report.rows if "lora_backend" in row}
    text += "".join(
        f" What computes the adapters in {engine}: {backend}."
        for engine, backend in backends.items()
        if backend
    )
    shown = [
        {**row, "shown": "without" if row["adapters"] is None else row["adapters"]}
        for row in report.rows
    ]
    return report.markdown(
        f"LoRA in decode steps of {details['model']}", text, table(_COLUMNS, shown)
    )
