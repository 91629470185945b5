"""The verbs of ``kiln kernels``. Each module is one of them; see ``add_commands``."""
