"""Kiln's templates as translation units for other build methods, each with its launcher."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kiln.jit_kernels.declare.spec import KernelSpec, label
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains.template import render

KERNELS = (
    "silu_and_mul",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "rms_norm",
    "fused_add_rms_norm",
    "apply_rotary",
)
EMPTY = 'extern "C" __global__ void empty() {}\n'  # measures the fixed cost of a build
_TYPES = {"int64": "int64_t", "int32": "int", "float": "float"}


@dataclass(frozen=True)
class Program:
    """One variant of a kernel: the unit of a build."""

    spec: KernelSpec
    variant: Mapping[str, str]

    @property
    def label(self) -> str:
        """Return the name of kernel and variant."""
        return label(self.spec, self.variant)

    @property
    def text(self) -> str:
        """Return the translation unit that Kiln compiles."""
        return render(self.spec, self.variant).text


def programs_of(kernels: Sequence[str]) -> list[Program]:
    """Return every variant of some kernels."""
    return [Program(spec, v) for spec in map(find_spec, kernels) for v in spec.variants()]


def write_headers(folder: Path, programs: Sequence[Program]) -> None:
    """Write the headers of some programs to a folder, adapted to nvcc.

    ptx.cuh enables its device side by NVRTC's macro and defines integer types that nvcc already
    has from <cstdint>. The copy enables the device side and omits these types.
    """
    for one in programs:
        for header, text in render(one.spec, one.variant).headers.items():
            if header == "kiln/ptx/ptx.cuh":
                text = text.replace("#ifdef __CUDACC_RTC__", "#include <cstdint>\n#if 1", 1)
                text = re.sub(r"^using u?int\d+_t = .*;\n", "", text, flags=re.M)
            path = folder / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def _parameters(program: Program) -> list[tuple[str, str]]:
    """Return (kind, C type) of each parameter of a kernel; pointer types as in the template."""
    spec = program.spec
    listed = re.search(rf"\b{spec.entry}\s*\(([^)]*)\)\s*\{{", program.text)
    assert listed is not None, f"{spec.source} has no {spec.entry}(…) {{"
    types = [" ".join(part.split()[:-1]) for part in listed[1].split(",")]
    return list(zip(spec.c_types, types, strict=True))


def template(program: Program) -> str:
    """Return the unit unchanged."""
    return program.text


def plain_c(program: Program) -> str:
    """Return the unit with a launcher that takes addresses: the minimum for a `.so`."""
    spec, kinds = program.spec, _parameters(program)
    parameters = [f"{_TYPES.get(kind, 'void*')} a{i}" for i, (kind, _) in enumerate(kinds)]
    passed = [f"({c})a{i}" for i, (_, c) in enumerate(kinds)]
    return (
        f"{program.text}\n"
        f'extern "C" int run({", ".join(parameters)}, int64_t grid, void* stream) {{\n'
        f"  {spec.entry}<<<dim3(grid), dim3(256), 0, (cudaStream_t)stream>>>"
        f"({', '.join(passed)});\n"
        f"  return cudaGetLastError();\n}}\n"
    )


def tvm_ffi(program: Program) -> str:
    """Return the unit with a launcher that takes tvm-ffi tensors, exported by tvm-ffi."""
    return (
        "#include <tvm/ffi/container/tensor.h>\n#include <tvm/ffi/extra/c_env_api.h>\n"
        f"#include <tvm/ffi/function.h>\n{program.text}\n"
        f"void run({_signature(program.spec, 'tvm::ffi::TensorView')}, int64_t grid) {{\n"
        "  DLDevice device = a0.device();\n"
        "  auto stream = (cudaStream_t)TVMFFIEnvGetStream(device.device_type, device.device_id);\n"
        f"  {_launch(program, 'data_ptr()', 'stream')}\n}}\n"
        "TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);\n"
    )


def torch_extension(program: Program) -> str:
    """Return the CUDA unit of a torch extension, like that of torch's load_inline.

    The stream is passed as a number, because only torch's CUDA wheels contain its CUDA headers.
    """
    return (
        "#include <torch/types.h>\n#include <cuda.h>\n#include <cuda_runtime.h>\n"
        f"{program.text}\n"
        f"void run({_signature(program.spec, 'torch::Tensor')}, int64_t grid, int64_t stream) {{\n"
        f"  {_launch(program, 'data_ptr()', '(cudaStream_t)stream')}\n}}\n"
    )


def torch_binding(program: Program) -> str:
    """Return the C++ unit that binds the launcher of ``torch_extension`` to Python."""
    signature = _signature(program.spec, "torch::Tensor")
    return (
        f"#include <torch/extension.h>\nvoid run({signature}, int64_t grid, int64_t stream);\n"
        'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run", &run); }\n'
    )


def _signature(spec: KernelSpec, tensor: str) -> str:
    kinds = enumerate(spec.c_types)
    return ", ".join(f"{_TYPES.get(kind, tensor)} a{i}" for i, kind in kinds)


def _launch(program: Program, pointer: str, stream: str) -> str:
    passed = [
        f"({c})a{i}.{pointer}" if kind == "pointer" else f"a{i}"
        for i, (kind, c) in enumerate(_parameters(program))
    ]
    return f"{program.spec.entry}<<<dim3(grid), dim3(256), 0, {stream}>>>({', '.join(passed)});"
