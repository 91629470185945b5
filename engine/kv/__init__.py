"""The KV pool: its blocks, their allocation, and its tensors."""
