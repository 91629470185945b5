"""Compile kernels to cubins through the kernel cache."""
