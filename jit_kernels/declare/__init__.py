"""How a kernel is declared: its spec, its parameters, its family, and the errors."""
