"""The resources read from a cubin are those that ptxas reports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains import nvrtc
from kiln.jit_kernels.toolchains.cubin import CubinError, Resources, resources_of
from kiln.jit_kernels.toolchains.template import Unit, render

_VALUES = 80
_LINES = "".join(f"float v{i} = p[threadIdx.x * {i + 1}];\n" for i in range(_VALUES))
_MIX = "".join(f"v{i} = v{i} * v{(i * 7 + 3) % _VALUES} + n;\n" for i in range(_VALUES))
_SUM = " + ".join(f"v{i}" for i in range(_VALUES))
# One kernel that must spill, one with an array in local memory, one with static shared memory.
SOURCE = f"""
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* p, int n) {{
  {_LINES} for (int k = 0; k < n; ++k) {{ {_MIX} }} p[0] = {_SUM};
}}
extern "C" __global__ void indexed(float* p, int n) {{
  float local[64];
  for (int i = 0; i < n; ++i) local[(i * 7) & 63] = p[i];
  p[0] = local[n & 63];
}}
extern "C" __global__ void sharing(float* p) {{
  __shared__ float room[333];
  room[threadIdx.x] = p[threadIdx.x];
  __syncthreads();
  p[threadIdx.x] = room[(threadIdx.x + 1) % 333];
}}
"""


@pytest.fixture
def compile_verbosely(monkeypatch):
    """Compile with ptxas's verbose output; return the cubin and the log."""

    def run(unit, arch):
        logs = []
        fetch = nvrtc._fetch

        def fetch_both(bindings, program, what):
            logs.append(fetch(bindings, program, "ProgramLog").decode())
            return fetch(bindings, program, what)

        options = nvrtc.options(arch)
        with monkeypatch.context() as patch:
            patch.setattr(nvrtc, "options", lambda arch: [*options, "--ptxas-options=-v"])
            patch.setattr(nvrtc, "_fetch", fetch_both)
            return nvrtc.compile_cubin("x", unit, arch), logs[0]

    return run


def told_by_ptxas(log):
    """Return name -> (registers, shared, stack, spill bytes) from ptxas's log."""
    found = {}
    for block in log.split("Compiling entry function ")[1:]:
        name = re.match(r"'(\w+)'", block)[1]
        stack, spilled = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores", block
        ).groups()
        shared = re.search(r"(\d+) bytes smem", block)
        registers = re.search(r"Used (\d+) registers", block)[1]
        found[name] = (int(registers), int(shared[1]) if shared else 0, int(stack), int(spilled))
    return found


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_100a", "sm_120"])
def test_registers_shared_memory_stack_and_spills(arch, compile_verbosely):
    cubin, log = compile_verbosely(Unit("x.cu", SOURCE, {}), arch)
    told = told_by_ptxas(log)
    assert set(told) == {"spilling", "indexed", "sharing"}
    assert told["spilling"][3] > 0
    assert told["sharing"][1] == 333 * 4
    for name, one in resources_of(cubin).items():
        registers, shared, stack, spilled = told[name]
        assert one == Resources(registers, shared, stack, one.spills)
        assert (one.spills > 0) == (spilled > 0)


def test_a_kernel_of_ours(compile_verbosely):
    spec = find_spec("fused_add_rms_norm")
    unit = render(spec, next(iter(spec.variants())))
    cubin, log = compile_verbosely(unit, "sm_90a")
    ((name, one),) = resources_of(cubin).items()
    assert name == spec.entry
    assert (one.registers, one.shared_bytes, one.stack_bytes, one.spills) == told_by_ptxas(log)[
        name
    ]


def test_what_is_no_cubin_is_refused():
    cubin = nvrtc.compile_cubin("x", Unit("x.cu", SOURCE, {}), "sm_80")
    for bad in (
        *(cubin[:size] for size in range(0, len(cubin), 97)),
        cubin[:-1],
        b"\0" * 4096,
        Path("/bin/sh").read_bytes(),
    ):
        with pytest.raises(CubinError):
            resources_of(bad)
