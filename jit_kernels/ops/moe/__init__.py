"""Mixture of experts: route_tokens, align_tokens, and moe_experts on top of them."""
