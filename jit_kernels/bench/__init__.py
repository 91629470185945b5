"""Kernel benchmarks: roofline ceilings, implementations of a kernel, timing side by side."""
