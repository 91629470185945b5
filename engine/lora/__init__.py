"""LoRA adapters: their files, the pool that holds them, and the layers that apply them."""
