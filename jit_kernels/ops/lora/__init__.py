"""LoRA: what each token's own adapter adds to a projection or an embedding."""
