"""Paged attention for prompts: a plan once a step, a kernel a layer."""
