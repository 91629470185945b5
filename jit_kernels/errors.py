"""The kernels' error tree.

KernelError
├── CompileError     a toolchain refused a translation unit; the message holds its log
├── ToolchainMissing the compiler of a toolchain is not installed
├── SealedMiss       the kernel cache is sealed, and a kernel is not in it
├── BundleRefused    a bundle of kernels cannot be read, or is not what it should be
├── NoSuchKernel     a kernel has no variant for a dtype, a shape or a device
├── LaunchError      the driver refused to load or launch
├── LateKernel       a kernel was to be compiled or loaded at a time when that must not happen
└── HostFault        the host toolchain caught a race, an out-of-bounds access, a deadlock, …
"""

from __future__ import annotations


class KernelError(RuntimeError):
    """Base of every error of this floor; its message is fit to show to a user."""


class CompileError(KernelError):
    """A toolchain refused a kernel. The message names kernel, variant, target and compiler."""


class ToolchainMissing(KernelError):
    """A compiler is not installed; the message says what to install."""


class SealedMiss(KernelError):
    """A sealed kernel cache lacks a kernel; the message names what differs from the nearest."""


class BundleRefused(KernelError):
    """A bundle of kernels is absent, damaged, tampered with or not to be trusted."""


class NoSuchKernel(KernelError):
    """A kernel has no variant that a model or a device needs; the message names both."""


class LaunchError(KernelError):
    """The CUDA driver refused to load or launch a kernel."""


class LateKernel(KernelError):
    """A kernel would be compiled or loaded while serving, or while a graph is captured."""


class HostFault(KernelError):
    """A kernel run on the CPU misbehaved; the message names threads and source lines."""
