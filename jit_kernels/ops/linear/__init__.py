"""Products of a few rows with the weights of a projection."""
