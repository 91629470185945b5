"""Weights of few bits, back to floats."""
