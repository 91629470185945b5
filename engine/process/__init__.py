"""The engine process, its messages, and the client of the API process."""
