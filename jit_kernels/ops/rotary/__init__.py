"""Rotary embeddings, NeoX style, and the tables of their cosines and sines."""
