"""torch.compile pieces: a model's forward pass as data, split at the attention operator."""
