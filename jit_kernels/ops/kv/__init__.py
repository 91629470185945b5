"""Writes to the KV pool: rope_store, once per layer and step, and copy_blocks."""
