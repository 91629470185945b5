"""The error hierarchy of kernels.

KernelError
├── CompileError     a toolchain failed to compile a translation unit
├── ToolchainMissing the compiler of a toolchain is not installed
├── SealedMiss       a cache miss in a sealed kernel cache
├── BundleRefused    a sealed bundle is unreadable, damaged or untrusted
├── NoSuchKernel     a kernel has no variant for a dtype, a shape or a device
├── LaunchError      the driver failed to load or launch a kernel
├── LateKernel       a kernel would be compiled or loaded while serving or during graph capture
└── HostFault        the host toolchain detected a race, an out-of-bounds access, a deadlock, …
"""

from __future__ import annotations


class KernelError(RuntimeError):
    """Base of every error in jit_kernels. Messages are written for users."""


class CompileError(KernelError):
    """A kernel did not compile. The message names kernel, variant, target and compiler."""


class ToolchainMissing(KernelError):
    """A compiler is not installed. The message says what to install."""


class SealedMiss(KernelError):
    """A cache miss in a sealed kernel cache. The message compares it with the nearest entry."""


class BundleRefused(KernelError):
    """A sealed bundle is absent, damaged or untrusted."""


class NoSuchKernel(KernelError):
    """A kernel has no variant for a dtype, a shape or a device. The message names it."""


class LaunchError(KernelError):
    """The CUDA driver failed to load or launch a kernel."""


class LateKernel(KernelError):
    """A kernel would be compiled or loaded while serving, or during CUDA graph capture."""


class HostFault(KernelError):
    """The host toolchain detected an error in a kernel. The message names threads and lines."""
