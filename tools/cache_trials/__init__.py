"""Trials of the kernel cache for tools/cache_stress.py; tests run them briefly."""
