"""LoRA by chunks: fixed numbers of sorted tokens, each of one adapter."""
