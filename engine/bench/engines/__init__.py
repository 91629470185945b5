"""The engines that a benchmark compares, all behind one interface."""
