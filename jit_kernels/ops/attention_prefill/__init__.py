"""Paged attention for prompts: one plan per step, one kernel per layer."""
