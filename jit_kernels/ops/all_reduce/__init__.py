"""Sums over the ranks of a tensor-parallel group, and such a sum fused with what follows it."""
