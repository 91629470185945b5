"""The kernels' error tree.

KernelError
├── CompileError     a toolchain refused a translation unit; the message holds its log
├── ToolchainMissing the compiler of a toolchain is not installed
├── LaunchError      the driver refused to load or launch
└── HostFault        the host toolchain caught a race, an out-of-bounds access, a deadlock, …
"""

from __future__ import annotations


class KernelError(RuntimeError):
    """Base of every error of this floor; its message is fit to show to a user."""


class CompileError(KernelError):
    """A toolchain refused a kernel. The message names kernel, variant, target and compiler."""


class ToolchainMissing(KernelError):
    """A compiler is not installed; the message says what to install."""


class LaunchError(KernelError):
    """The CUDA driver refused to load or launch a kernel."""


class HostFault(KernelError):
    """A kernel run on the CPU misbehaved; the message names threads and source lines."""
