"""Quantisation to fp8 (e4m3) and int8: alone, and fused with a norm or an activation."""
