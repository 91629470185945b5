"""The parts of bench_cold_build.py."""
