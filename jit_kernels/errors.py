"""The errors of kernels: KernelError and its subclasses."""

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
