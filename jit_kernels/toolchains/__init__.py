"""Translation units and their compilers: NVRTC for GPUs, the host compiler for CPUs."""
