"""Kiln's templates as translation units for other compilers, each with a launcher of its style."""

from __future__ import annotations

import re
from pathlib import Path

from kiln.jit_kernels.compile.template import render
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.spec import KernelSpec

KERNELS = (
    "silu_and_mul",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "rms_norm",
    "fused_add_rms_norm",
    "apply_rotary",
)
_TYPES = {"int64": "int64_t", "int32": "int", "float": "float"}


def write_headers(folder: Path, kernels: list[str]) -> None:
    """Write the headers of some kernels below a folder, as nvcc can read them.

    ptx.cuh chooses its device side by NVRTC's own macro, and names the integer types that nvcc
    already has from <cstdint>: the copy takes the device side and leaves the names out.
    """
    for name in kernels:
        for header, text in render(find_spec(name), bf16(find_spec(name))).headers.items():
            if header == "kiln/ptx.cuh":
                text = text.replace("#ifdef __CUDACC_RTC__", "#include <cstdint>\n#if 1", 1)
                text = re.sub(r"^using u?int\d+_t = .*;\n", "", text, flags=re.M)
            path = folder / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def bf16(spec: KernelSpec) -> dict[str, str]:
    """Return the variant of a kernel for bf16."""
    return next(dict(v) for v in spec.variants() if v["scalar_t"] == "kiln::bf16")


def template(name: str) -> str:
    """Return the translation unit that Kiln compiles."""
    spec = find_spec(name)
    return render(spec, bf16(spec)).text


def _parameters(spec: KernelSpec) -> list[tuple[str, str]]:
    """Return (kind, C type) of each parameter of a kernel, pointers as the template writes them."""
    text = template(spec.name)
    listed = re.search(rf"\b{spec.entry}\s*\(([^)]*)\)\s*\{{", text)
    assert listed is not None, f"{spec.source} has no {spec.entry}(…) {{"
    types = [" ".join(part.split()[:-1]) for part in listed[1].split(",")]
    return list(zip(spec.arguments, types, strict=True))


def plain_c(name: str) -> str:
    """Return the unit with a launcher that takes addresses: the least that a `.so` needs."""
    spec = find_spec(name)
    kinds = _parameters(spec)
    parameters = [f"{_TYPES.get(kind, 'void*')} a{i}" for i, (kind, _) in enumerate(kinds)]
    passed = [f"({c})a{i}" for i, (_, c) in enumerate(kinds)]
    return (
        f"{template(name)}\n"
        f'extern "C" int run({", ".join(parameters)}, int64_t grid, void* stream) {{\n'
        f"  {spec.entry}<<<dim3(grid), dim3(256), 0, (cudaStream_t)stream>>>"
        f"({', '.join(passed)});\n"
        f"  return cudaGetLastError();\n}}\n"
    )


def tvm_ffi(name: str) -> str:
    """Return the unit with a launcher that takes tvm-ffi tensors, exported in its calling form."""
    spec = find_spec(name)
    return (
        "#include <tvm/ffi/container/tensor.h>\n#include <tvm/ffi/extra/c_env_api.h>\n"
        f"#include <tvm/ffi/function.h>\n{template(name)}\n"
        f"void run({_signature(spec, 'tvm::ffi::TensorView')}, int64_t grid) {{\n"
        "  DLDevice device = a0.device();\n"
        "  auto stream = (cudaStream_t)TVMFFIEnvGetStream(device.device_type, device.device_id);\n"
        f"  {_launch(spec, 'data_ptr()', 'stream')}\n}}\n"
        "TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);\n"
    )


def torch_extension(name: str) -> str:
    """Return the CUDA unit of a torch extension, as load_inline of torch.utils would write it.

    The stream is passed as a number: torch's CUDA headers are only in its CUDA wheels.
    """
    spec = find_spec(name)
    return (
        "#include <torch/types.h>\n#include <cuda.h>\n#include <cuda_runtime.h>\n"
        f"{template(name)}\n"
        f"void run({_signature(spec, 'torch::Tensor')}, int64_t grid, int64_t stream) {{\n"
        f"  {_launch(spec, 'data_ptr()', '(cudaStream_t)stream')}\n}}\n"
    )


def torch_binding(name: str) -> str:
    """Return the C++ unit that binds the launcher of ``torch_extension`` to Python."""
    signature = _signature(find_spec(name), "torch::Tensor")
    return (
        f"#include <torch/extension.h>\nvoid run({signature}, int64_t grid, int64_t stream);\n"
        'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run", &run); }\n'
    )


def _signature(spec: KernelSpec, tensor: str) -> str:
    kinds = enumerate(spec.arguments)
    return ", ".join(f"{_TYPES.get(kind, tensor)} a{i}" for i, kind in kinds)


def _launch(spec: KernelSpec, pointer: str, stream: str) -> str:
    passed = [
        f"({c})a{i}.{pointer}" if kind == "pointer" else f"a{i}"
        for i, (kind, c) in enumerate(_parameters(spec))
    ]
    return f"{spec.entry}<<<dim3(grid), dim3(256), 0, {stream}>>>({', '.join(passed)});"
