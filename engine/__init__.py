"""The inference engine: from requests to tokens."""
