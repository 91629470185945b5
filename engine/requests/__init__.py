"""A request from sampling parameters to finish reason, and the batch of one step."""
