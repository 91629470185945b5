"""The kinds of ``kiln bench``. Each module has NAME, HELP, add_arguments and run."""
