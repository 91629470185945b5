"""The ``kiln`` command."""
