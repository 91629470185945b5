"""The kernels' error tree.

KernelError
├── CompileError     a kernel did not compile; the message holds the compiler's log
├── ToolchainMissing the compiler of a toolchain is not installed
├── SealedMiss       the kernel cache is sealed, and a kernel is not in it
├── BundleRefused    a bundle of kernels cannot be read, or is damaged or untrusted
├── NoSuchKernel     a kernel has no variant for a dtype, a shape or a device
├── LaunchError      the driver refused to load or launch
├── LateKernel       a kernel would be compiled or loaded while serving, or during graph capture
└── HostFault        the host toolchain caught a race, an out-of-bounds access, a deadlock, …
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
    """A kernel has no variant that a model or a device needs; the message names both."""


class LaunchError(KernelError):
    """The CUDA driver failed to load or launch a kernel."""


class LateKernel(KernelError):
    """A kernel would be compiled or loaded while serving, or during CUDA graph capture."""


class HostFault(KernelError):
    """The host toolchain detected an error in a kernel. The message names threads and lines."""
