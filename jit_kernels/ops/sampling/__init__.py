"""Sampling: sample_tokens draws one token for each row of logits."""
