"""Root mean square norms: rms_norm, and fused_add_rms_norm for the residual stream."""
