"""Checks of kernels beyond parity: races under many schedules, and the same bits in any batch."""
