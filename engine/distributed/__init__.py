"""The ranks of tensor parallelism: how they are started, watched, and how they exchange tensors."""
