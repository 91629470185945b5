"""What kernels there can be: specs, parameters, families, targets, toggles, and the errors."""
