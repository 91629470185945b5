"""Bytes on disk, and the environment. Standard library only."""
