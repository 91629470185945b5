"""Arguments reach the driver as the kernel expects them; a fake driver reads them back."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from kiln.jit_kernels.errors import LaunchError
from kiln.jit_kernels.launch import ArgumentBlock, LoadedKernel
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.spec import LaunchGeometry

KINDS = {
    "pointer": ctypes.c_void_p,
    "int64": ctypes.c_int64,
    "int32": ctypes.c_int32,
    "float": ctypes.c_float,
}


def read_back(address, kinds):
    """What a driver sees: an array of pointers, each to one argument."""
    pointers = (ctypes.c_void_p * len(kinds)).from_address(address)
    return [KINDS[k].from_address(p).value for k, p in zip(kinds, pointers, strict=True)]


class FakeDriver:
    def __init__(self, kinds, error=0):
        self.kinds, self.error, self.calls = kinds, error, []

    def cuLaunchKernel(self, function, *rest):
        geometry, stream, address = rest[:7], rest[7], rest[8]
        self.calls.append((function, geometry, stream, read_back(address, self.kinds)))
        return (self.error,)

    def cuGetErrorName(self, error):
        return 0, b"CUDA_ERROR_INVALID_VALUE"

    def cuGetErrorString(self, error):
        return 0, b"invalid argument"


@pytest.mark.parametrize("spec", all_specs().values(), ids=lambda spec: spec.name)
def test_every_kernels_arguments_arrive(spec):
    driver = FakeDriver(spec.arguments)
    kernel = LoadedKernel(spec.name, "function", spec.arguments)
    for sizes in spec.sizes:
        bound = spec.bind(*spec.make_inputs(next(iter(spec.variants())), sizes, "cpu"))
        geometry = spec.geometry(bound.variant, bound.sizes)
        kernel.launch(driver, geometry, bound.values, 77)
        if 0 in geometry.grid:
            continue
        function, launched, stream, seen = driver.calls[-1]
        assert (function, stream) == ("function", 77)
        assert launched == (*geometry.grid, *geometry.block, geometry.shared_bytes)
        for got, value in zip(seen, bound.values, strict=True):
            want = value.data_ptr() if isinstance(value, torch.Tensor) else value
            assert got == pytest.approx(want, rel=1e-6)
    empty = [sizes for sizes in spec.sizes if 0 in sizes.values() and "gap" in sizes]
    assert len(driver.calls) < len(spec.sizes) or not empty, "an empty grid is never launched"


def test_offsets_beyond_32_bits_are_kept():
    block = ArgumentBlock(["int64", "int32", "float", "pointer"])
    address = block.pack([2**40 + 3, -5, 0.5, 2**63 + 1])
    assert read_back(address, ["int64", "int32", "float", "pointer"]) == [
        2**40 + 3, -5, 0.5, 2**63 + 1,
    ]  # fmt: skip


def test_each_thread_packs_its_own_block():
    block = ArgumentBlock(["int64"])
    addresses = {block.pack([1])}

    def work():
        addresses.add(block.pack([2]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(addresses) == 2
    assert read_back(block.address, ["int64"]) == [1]


def test_a_refused_launch_says_what_and_why():
    driver = FakeDriver(["int64"], error=1)
    with pytest.raises(LaunchError, match=r"rms_norm.*CUDA_ERROR_INVALID_VALUE"):
        LoadedKernel("rms_norm", None, ["int64"]).launch(
            driver, LaunchGeometry((1, 1, 1), (32, 1, 1)), [1], 0
        )
