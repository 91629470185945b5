"""Ways to load a cubin and launch a kernel of it, behind one protocol."""
