"""Run kernels from a sealed bundle built on another machine, in a process that cannot compile."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from gpu.pace import NotMeasured, Row, first_line
from kiln.cache.disk.bundle import Bundle
from kiln.jit_kernels.compile.build import Built
from kiln.jit_kernels.compile.ingredients import stored_ingredients, value_of
from kiln.jit_kernels.compile.ready import ready_guard
from kiln.jit_kernels.declare.parity import compare
from kiln.jit_kernels.declare.spec import KernelSpec, label
from kiln.jit_kernels.launch import launch, load_kernels, target_arch
from kiln.jit_kernels.registry import operators

_SECONDS = 90


def sealed_bundle(args: argparse.Namespace) -> list[Row]:
    """Load every kernel from the bundle without NVRTC and run one parity case of each.

    The cache is sealed and the cache folder empty. Compiling or loading after "ready" is an error.
    The first row names the NVRTC that built the kernels and the driver that loaded them. Raises
    NotMeasured if no bundle is given.
    """
    if args.bundle is None:
        raise NotMeasured("no --bundle FILE: create one with kiln warmup --export FILE")
    tools = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as empty:
        environ = os.environ | {
            "KILN_KERNEL_CACHE": "sealed",
            "KILN_KERNEL_CACHE_DIR": empty,
            "KILN_KERNEL_BUNDLE": str(Path(args.bundle).resolve()),
            "KILN_JIT_AFTER_READY": "error",
            "PYTHONPATH": os.pathsep.join([str(tools), str(tools / "import_root")]),
        }
        done = subprocess.run(
            [sys.executable, "-m", "gpu.sealed", str(args.bundle)],
            env=environ, stdout=subprocess.PIPE, text=True, timeout=_SECONDS,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the sealed process ended with {done.returncode}: see its last output")
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def serve(bundle: Path) -> list[Row]:
    """Return a row for the bundle, then one per kernel."""
    device = torch.device("cuda", torch.cuda.current_device())
    arch = target_arch(device)
    entries = [(a, entry) for a, _, entry in Bundle.open(bundle).entries()]
    builders = {value_of(stored_ingredients(entry.header), "toolchain") for _, entry in entries}
    tiers: dict[str, str] = {}

    def note(name: str, built: Built) -> None:
        tiers[name] = built.tier

    rows: list[Row] = []
    loaded = []
    for spec in operators():
        try:
            load_kernels([spec], device, on_built=note)
            loaded.append(spec)
        except Exception as error:  # this row fails; the others still run
            rows.append({"kernel": spec.name, "status": first_line(error), "ok": False})
    ready_guard().declare_ready()
    rows += [_parity_row(spec, tiers) for spec in loaded]
    about = {
        "kernel": "(all)",
        "bundle": bundle.name,
        "entries": len(entries),
        "for_this_gpu": sum(a == arch for a, _ in entries),
        "built_by": ", ".join(sorted(builders)),
        "loaded_by_driver": _driver_version(),
        "nvrtc_in_this_process": _maps_nvrtc(),
    }
    return [about, *rows]


def _parity_row(spec: KernelSpec, tiers: dict[str, str]) -> Row:
    """Run one case of every variant; ``ok`` also requires that each is from the bundle."""
    worst, from_bundle, variants = 0.0, 0, list(spec.variants())
    try:
        for variant in variants:
            sizes = max(spec.sizes, key=lambda sizes: spec.cost(variant, sizes).bytes)
            found = compare(spec, variant, sizes, lambda a: launch(spec, a), "cuda")
            share = found.error / found.allowed if found.allowed else float(not found.holds) * 2
            worst = max(worst, share) if share == share else float("inf")
            from_bundle += tiers.get(label(spec, variant)) == "bundle"
    except Exception as error:
        return {"kernel": spec.name, "status": first_line(error), "ok": False}
    row = {"kernel": spec.name, "variants": len(variants), "from_bundle": from_bundle}
    ok = worst <= 1 and from_bundle == len(variants)
    return row | {"worst_error_of_allowed": round(worst, 3), "ok": ok}


def _driver_version() -> str:
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else "unknown"


def _maps_nvrtc() -> bool:
    """Whether this process has loaded any NVRTC."""
    return "libnvrtc" in Path("/proc/self/maps").read_text()


if __name__ == "__main__":
    print(json.dumps(serve(Path(sys.argv[1]))))
