"""Compilers of translation units: NVRTC for GPUs, the host compiler for CPUs."""
