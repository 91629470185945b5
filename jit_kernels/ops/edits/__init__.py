"""What changes the logits of a request because of the tokens that it has."""
