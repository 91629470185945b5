"""Text to tokens and back: tokenizer, chat template, prompts, stop strings, outputs."""
