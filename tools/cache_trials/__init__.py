"""Trials of the kernel cache that tools/cache_stress.py runs, and tests in short."""
