"""Products of many rows with quantised weights."""
