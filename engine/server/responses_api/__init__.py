"""The routes of OpenAI's Responses API."""
