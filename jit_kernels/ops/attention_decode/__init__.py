"""Paged attention for decode and draft verification: a plan once a step, a kernel a layer."""
