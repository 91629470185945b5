"""CUDA C++ templates and headers. Data only."""
