"""Grammars of structured outputs: built from requests, compiled, and turned into masks."""
