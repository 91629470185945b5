"""The verbs of ``kiln kernels``: a module each, with NAME, HELP, add_arguments and run."""
