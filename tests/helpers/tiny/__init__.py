"""Packers of quantised checkpoints for tests, one module a format: each has a list PACKERS.

They are written from the formats' descriptions alone and share no code with Kiln.
"""
