"""Triton implementations that a toggle can choose, one module per family."""
