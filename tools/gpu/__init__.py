"""The sections of tools/gpu_check.py."""
