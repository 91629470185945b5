"""One module a command; each is found by its place in this folder."""
