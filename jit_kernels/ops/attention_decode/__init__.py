"""Paged attention for decode and draft verification: one plan per step, one kernel per layer."""
