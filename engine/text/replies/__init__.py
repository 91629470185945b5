"""What a model's reply consists of: reasoning, content and tool calls, read from its text."""
