"""What decode and prefill attention share; no kernel family of its own, for it has no spec.py."""
