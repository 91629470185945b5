"""What several kernel families use: arrays and views of public functions, threads per row."""
