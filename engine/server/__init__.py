"""The HTTP server: OpenAI's protocol in front of one engine process."""
