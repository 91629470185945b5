"""One module or package per command; see ``add_commands``."""
