"""Drafts of a step: proposed from the tokens of their rows, and verified."""
