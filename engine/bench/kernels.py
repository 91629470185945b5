"""Benchmark every kernel against its alternatives: its time, and its fraction of the roofline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from kiln.engine.bench.engine import Tell
from kiln.engine.bench.machine import versions
from kiln.engine.bench.report import Plots, Report, Row, command_line, grid, grouped
from kiln.engine.bench.roofline import draw_roofline
from kiln.jit_kernels.bench import peers
from kiln.jit_kernels.bench.ceilings import measure_ceilings
from kiln.jit_kernels.bench.measure import Wanted, bench_kernel
from kiln.jit_kernels.bench.table import MEASURED, remarks, side_by_side
from kiln.jit_kernels.declare.spec import KernelSpec

CPU_REMARK = "CPU SMOKE TEST: these numbers say nothing about a GPU"


def measure(
    specs: Iterable[KernelSpec], device: str, tell: Tell, *, compiled: bool, beside_peers: bool
) -> Report:
    """Measure the machine's ceilings, then the kernels on "cuda" or "cpu".

    ``compiled``: also torch.compile. ``beside_peers``: also other installed libraries.
    """
    wanted = Wanted(device, compiled=compiled, peers=beside_peers)
    tell("measuring the machine")
    ceilings = measure_ceilings(wanted.device)
    return Report(
        "kernels",
        command_line("kiln"),
        [row for spec in specs for row in bench_kernel(spec, ceilings, wanted, tell)],
        details={"device": wanted.device, "ceilings": asdict(ceilings)},
        remark=CPU_REMARK if wanted.device == "cpu" else "",
        versions=versions() | (peers.versions() if wanted.peers else {}),
    )


def markdown(report: Report) -> str:
    """Return the report's page."""
    return report.markdown("Kernels", *blocks(report.rows, report.details["ceilings"]))


def write(report: Report, folder: Path) -> list[Path]:
    """Write kernels.json, kernels.md and roofline-FAMILY.png into a folder; return their paths.

    A smoke test on a CPU has -cpu-smoke-test in every name.
    """
    mark = "-cpu-smoke-test" if report.details["device"] == "cpu" else ""
    processor = report.hardware["cpu" if mark else "gpu"]
    where = " ".join(filter(None, (processor, report.remark))) + f", {report.date[:10]}"
    ceilings = report.details["ceilings"]
    plots = rooflines(report.rows, ceilings, where, mark)
    return report.write(folder, f"kernels{mark}", markdown(report), plots)


def blocks(rows: Sequence[Row], ceilings: Mapping[str, float]) -> list[str]:
    """Return the rows as Markdown: how to read them, the table, remarks."""
    return [
        f"Ceilings: copy {ceilings['copy_bytes_s'] / 1e12:.2f} TB/s, matrix product "
        f"{ceilings['matmul_flops_s'] / 1e12:,.1f} TFLOP/s, smallest launch "
        f"{ceilings['launch_us']:.2f} µs, measured on this machine just before. µs: median over "
        "rounds in which all implementations take turns; ±: interquartile range over the median; "
        "of floor: the shortest possible time for the bytes or operations at those rates over the "
        "measured time. Ratio above 1: Kiln is faster. From sm_90 on, a Kiln launch may overlap "
        "the previous one (programmatic dependent launch), also in graphs; the others' do not.",
        grid(*side_by_side(rows)),
        "\n".join(f"- {remark}" for remark in remarks(rows)),
    ]


def rooflines(
    rows: Iterable[Row], ceilings: Mapping[str, float], where: str, mark: str = ""
) -> Plots:
    """Return roofline-FAMILY.png and its drawing function for each family with numbers."""
    families = grouped((row for row in rows if row["status"] == MEASURED), "family")
    return {
        f"roofline-{family}{mark}.png": partial(draw_roofline, mine, ceilings, where)
        for family, mine in families.items()
    }
