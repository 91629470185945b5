"""The routes of Anthropic's Messages API."""
