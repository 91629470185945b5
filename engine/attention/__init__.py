"""Paged attention, and the one ambient context that tells it about the step."""
