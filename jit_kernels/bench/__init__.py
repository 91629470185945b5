"""Measuring kernels: ceilings of the machine, ways to run a kernel, times side by side."""
