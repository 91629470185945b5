"""The kernel cache on disk, and the environment variables. Standard library only."""
