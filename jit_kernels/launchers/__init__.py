"""Launchers: ways to load a cubin and launch its kernels, behind one protocol."""
