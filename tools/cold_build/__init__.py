"""Modules of bench_cold_build.py."""
