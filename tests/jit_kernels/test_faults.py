"""Planted faults: a patched source of every real kernel, each of which the checks must catch.

A patch names the text that it replaces, so that a fault cannot quietly stop being planted.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest

from kiln.jit_kernels.check import check_kernel
from kiln.jit_kernels.compile.template import Unit, render
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.settings import settings
from kiln.jit_kernels.spec import LaunchGeometry
from kiln.jit_kernels.toolchains import host

REDUCE, VEC = "kiln/reduce.cuh", "kiln/vec.cuh"


@dataclass(frozen=True)
class Fault:
    kernel: str
    name: str
    old: str
    new: str
    header: str = ""  # "": the template itself
    few_blocks: bool = False  # one block takes all rows, as on a GPU with fewer blocks than rows
    scalar: str = "kiln::bf16"

    @property
    def id(self):
        return f"{self.kernel}-{self.name}"


BARRIERS = [
    ("barrier before the sums are read", "/ 32] = x;\n  __syncthreads();", "/ 32] = x;", False),
    ("barrier after the sums were read",
     "__syncthreads();  // earlier readers of partial are done", "", True),
]  # fmt: skip
LOOP = "for (int64_t i = vectors_end + threadIdx.x; i < d; i += blockDim.x)\n      "
NO_LOOP = LOOP.replace("i < d", "i < vectors_end")
MISALIGNED = ("return aligned ?", "return true ?")
ROUNDED_UP = (
    "size - size % Vec<T>::kSize",
    "(size + Vec<T>::kSize - 1) / Vec<T>::kSize * Vec<T>::kSize",
)

FAULTS = [
    *(
        Fault(kernel, f"dropped {name}", old, new, REDUCE, few)
        for kernel in ("rms_norm", "fused_add_rms_norm")
        for name, old, new, few in BARRIERS
    ),
    *(
        Fault(kernel, "half of each warp left out of the sum", "m = 16; m; m >>= 1) x +=",
              "m = 8; m; m >>= 1) x +=", REDUCE)
        for kernel in ("rms_norm", "fused_add_rms_norm")
    ),
    *(
        Fault(kernel, name, old, new, VEC)
        for kernel, name, (old, new) in [
            ("rms_norm", "misaligned vectors", MISALIGNED),
            ("rms_norm", "vectors past the row", ROUNDED_UP),
            ("fused_add_rms_norm", "misaligned vectors", MISALIGNED),
            ("fused_add_rms_norm", "vectors past the row", ROUNDED_UP),
            # Its rows have a tail only where `up` is misaligned, and then no vectors.
            ("silu_and_mul", "misaligned vectors", MISALIGNED),
        ]
    ),
    Fault("rms_norm", "dropped tail of the sum", LOOP + "sum", NO_LOOP + "sum"),
    Fault("rms_norm", "dropped tail of the result", LOOP + "scale", NO_LOOP + "scale"),
    Fault("rms_norm", "wrong scale", "partial) / d + eps", "partial) / (d + 1) + eps"),
    Fault("rms_norm", "no square root", "1.0f / sqrtf(", "1.0f / ("),
    Fault("rms_norm", "no weight", "* kiln::to_float(weight), y", ", y"),
    Fault("rms_norm", "rows taken as dense", "x + row * x_stride", "x + row * d"),
    Fault("fused_add_rms_norm", "dropped tail of the sum", LOOP + "sum", NO_LOOP + "sum"),
    Fault("fused_add_rms_norm", "dropped tail of the result", LOOP + "scale", NO_LOOP + "scale"),
    Fault("fused_add_rms_norm", "wrong scale", "partial) / d + eps", "partial) / (d + 1) + eps"),
    Fault("fused_add_rms_norm", "sum not stored", "      r.store(sums + i);\n", ""),
    Fault("fused_add_rms_norm", "norm of x alone", "const Vec r = Vec::load(sums + i), w",
          "const Vec r = Vec::load(y + i), w"),
    Fault("silu_and_mul", "dropped tail", "i = vectors_end + first; i < d;",
          "i = vectors_end + first; i < vectors_end;"),
    Fault("silu_and_mul", "columns written by every block", "blockIdx.y * int64_t(blockDim.x) +",
          "0 * int64_t(blockDim.x) +"),
    Fault("silu_and_mul", "gate taken for up", "up = gate + d;", "up = gate;"),
    Fault("silu_and_mul", "wrong sign", "expf(-x)", "expf(x)"),
    Fault("gelu_and_mul", "wrong scale", "0.70710678118654752f", "0.7f", scalar="float"),
    Fault("gelu_tanh_and_mul", "wrong scale", "0.044715f", "0.045f", scalar="float"),
    Fault("apply_rotary", "dropped tail", "pair < pairs;", "pair < pairs - 1;"),
    Fault("apply_rotary", "tail past the end", "pair < pairs;", "pair <= pairs;"),
    Fault("apply_rotary", "wrong sign", "a * c - b * s", "a * c + b * s"),
    Fault("apply_rotary", "wrong row of the table", "positions[token] * 2", "token * 2"),
    Fault("apply_rotary", "reads what it has just written",
          "b * c + a * s", "b * c + kiln::to_float(x[i]) * s"),
    Fault("apply_rotary", "wrong key head", "(head - query_heads) *", "head *"),
    Fault("apply_rotary", "halves side by side",
          "x[half + i]);\n      const", "x[i + 1]);\n      const"),
]  # fmt: skip


def patched(fault, spec, variant):
    unit = render(spec, variant)
    text = unit.headers[fault.header] if fault.header else unit.text
    assert fault.old in text, f"{fault.id}: nothing to replace"
    text = text.replace(fault.old, fault.new)
    if fault.header:
        return Unit(unit.name, unit.text, {**unit.headers, fault.header: text})
    return Unit(unit.name, text, unit.headers)


def planted(fault):
    """The spec to check, its one variant, and how to render it with the fault in."""
    spec = find_spec(fault.kernel)
    variant = next(v for v in spec.variants() if v["scalar_t"] == fault.scalar)
    if fault.few_blocks:

        def one_block(variant, sizes):
            whole = find_spec(fault.kernel).geometry(variant, sizes)
            return LaunchGeometry((min(whole.grid[0], 1), 1, 1), whole.block)

        spec = replace(spec, geometry=one_block)
    return spec, variant, lambda spec, variant: patched(fault, spec, variant)


def check(fault, unit_of=None):
    spec, variant, with_fault = planted(fault)
    return check_kernel(
        spec, seeds=1, env=settings(), variants=[variant], unit_of=unit_of or with_fault
    )


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Compile ahead of the tests, two at a time."""

    def build(fault):
        spec, variant, with_fault = planted(fault)
        unit = with_fault(spec, variant)
        host.build(unit, spec.entry, spec.arguments, name=fault.id, checked=True, env=settings())

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(build, fault) for fault in FAULTS]
        yield
        for future in futures:
            future.cancel()


@pytest.fixture(scope="module")
def score(request):
    caught = []
    yield caught
    plugins = request.config.pluginmanager
    with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
        line = f" mutation score: {sum(caught)} of {len(caught)} planted faults caught"
        plugins.get_plugin("terminalreporter").write_line(line)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_planted_fault_is_caught(fault, score):
    findings = check(fault)
    score.append(bool(findings))
    assert findings


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.few_blocks], ids=lambda fault: fault.id)
def test_several_rows_a_block_are_fine_without_a_fault(fault):
    assert not check(fault, render)


@pytest.mark.parametrize(
    ("fault", "category"),
    [
        ("rms_norm-dropped barrier before the sums are read", "data race on shared memory"),
        ("rms_norm-dropped barrier after the sums were read", "data race on shared memory"),
        ("rms_norm-misaligned vectors", "misaligned access"),
        ("rms_norm-vectors past the row", "out-of-bounds"),
        ("rms_norm-dropped tail of the result", "wrong result: error nan"),
        ("silu_and_mul-columns written by every block", "data race on global memory"),
        ("apply_rotary-wrong sign", "wrong result"),
    ],
)
def test_a_finding_names_case_and_category(fault, category):
    fault = next(f for f in FAULTS if f.id == fault)
    finding = next(f for f in check(fault) if category in f.report)
    assert finding.case.startswith(f"{fault.kernel}[bf16")
    assert finding.seed == 0
