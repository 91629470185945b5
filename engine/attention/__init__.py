"""Paged attention, and the global context through which it reads the current step."""
