"""Kernels, from template to launch."""
