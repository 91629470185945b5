"""The verbs of ``kiln kernels``. Each module has NAME, HELP, add_arguments and run."""
