"""CUDA graphs of whole decode steps, by batch size, and their emulation on a CPU."""
