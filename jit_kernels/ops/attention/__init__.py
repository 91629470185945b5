"""Code shared by decode and prefill attention; not a kernel family, because it has no spec.py."""
