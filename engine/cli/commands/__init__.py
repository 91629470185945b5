"""One module per command; every module in this folder is a command."""
