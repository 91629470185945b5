"""A kernel from template to launch."""
