"""References that are too long for their family's module: oracle, CPU operator and torch choice."""
