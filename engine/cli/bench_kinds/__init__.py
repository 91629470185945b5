"""The kinds of ``kiln bench``. Each module is one of them; see ``add_commands``."""
