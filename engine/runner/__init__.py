"""Execution of a Batch: inputs, forward pass, sampling."""
