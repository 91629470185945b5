"""Trials of a server's life for tools/engine_faults.py; tests run them briefly."""
