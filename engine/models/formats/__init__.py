"""One module a format of quantised checkpoints: each declares FORMAT."""
