"""Faults planted in the activation kernels; see test_faults.py."""

FAULTS = [
    {
        "kernel": "silu_and_mul",
        "name": "misaligned vectors",
        "old": "return aligned ?",
        "new": "return true ?",
        "header": "kiln/vec.cuh",
    },
    {
        "kernel": "silu_and_mul",
        "name": "dropped tail",
        "old": "i = vectors_end + first; i < d;",
        "new": "i = vectors_end + first; i < vectors_end;",
    },
    {
        "kernel": "silu_and_mul",
        "name": "columns written by every block",
        "old": "blockIdx.y * int64_t(blockDim.x) +",
        "new": "0 * int64_t(blockDim.x) +",
    },
    {
        "kernel": "silu_and_mul",
        "name": "gate taken for up",
        "old": "up = gate + d;",
        "new": "up = gate;",
    },
    {
        "kernel": "silu_and_mul",
        "name": "wrong sign",
        "old": "expf(-x)",
        "new": "expf(x)",
    },
    {
        "kernel": "gelu_and_mul",
        "name": "wrong scale",
        "old": "0.70710678118654752f",
        "new": "0.7f",
        "needs": {"scalar_t": "float"},
    },
    {
        "kernel": "gelu_tanh_and_mul",
        "name": "wrong scale",
        "old": "0.044715f",
        "new": "0.045f",
        "needs": {"scalar_t": "float"},
    },
]
