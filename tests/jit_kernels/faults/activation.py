"""Faults planted in the activation kernels; see test_faults.py."""

_PIECES = "activation/pieces.cuh"
_ACTIVATIONS = "kiln/math/activations.cuh"
_FLOAT = {"scalar_t": "float"}
_SMALL = [{"rows": 5, "d": 256, "gap": 8}]
_CLAMPED = {"kernel": "clamped_swiglu", "sizes": _SMALL}

FAULTS = [
    {
        "kernel": "silu_and_mul",
        "header": _PIECES,
        "name": "misaligned vectors",
        "old": "uint32_t(d) | uint32_t(x_stride) | uint32_t(out_stride)",
        "new": "uint32_t(d)",
        "sizes": [{"rows": 3, "d": 64, "gap": 3}],
    },
    {
        "kernel": "silu_and_mul",
        "header": _PIECES,
        "name": "dropped last piece",
        "old": "if (first < size) store_words",
        "new": "if (first + Piece<T>::kSize < size) store_words",
        "sizes": _SMALL,
    },
    {
        "kernel": "silu_and_mul",
        "header": _PIECES,
        "name": "dropped tail",
        "old": "i < first + Piece<T>::kSize && i < d;",
        "new": "i < first + Piece<T>::kSize && i < d - 1;",
        "sizes": [{"rows": 3, "d": 7, "gap": 0}],
    },
    {
        "kernel": "silu_and_mul",
        "header": _PIECES,
        "name": "columns written by every block",
        "old": "blockIdx.x * kPieces",
        "new": "0 * kPieces",
        "sizes": [{"rows": 1, "d": 2056, "gap": 0}],
    },
    {
        "kernel": "silu_and_mul",
        "header": _PIECES,
        "name": "half of the columns",
        "old": "constexpr int kPieces = 2;",
        "new": "constexpr int kPieces = 1;",
        "sizes": _SMALL,
    },
    {
        "kernel": "silu_and_mul",
        "header": _PIECES,
        "name": "one row of each block",
        "old": "int64_t(block) * blockDim.y + threadIdx.y",
        "new": "int64_t(block) * blockDim.y",
        "sizes": _SMALL,
    },
    {
        "kernel": "silu_and_mul",
        "header": _PIECES,
        "name": "gate taken for up",
        "old": "*u = g + size;",
        "new": "*u = g;",
        "sizes": _SMALL,
    },
    {
        "kernel": "gelu_and_mul",
        "name": "the distribution of the wrong side",
        "old": "x > 0.0f ? sub_rn(1.0f, p) : p",
        "new": "x < 0.0f ? sub_rn(1.0f, p) : p",
        "header": _ACTIVATIONS,
        "sizes": _SMALL,
    },
    {
        "kernel": "gelu_and_mul",
        "name": "a coefficient a little off",
        "old": "7.084459219894639e-3f",
        "new": "7.15e-3f",
        "header": _ACTIVATIONS,
        "needs": _FLOAT,
        "sizes": _SMALL,
    },
    {
        "kernel": "gelu_tanh_and_mul",
        "name": "wrong scale",
        "old": "0.044715f",
        "new": "0.045f",
        "header": _ACTIVATIONS,
        "needs": _FLOAT,
        "sizes": _SMALL,
    },
    _CLAMPED | {
        "name": "the gate not clamped",
        "old": "gate > limit ? limit : gate",
        "new": "gate",
    },
    _CLAMPED | {
        "name": "the gate clamped below too",
        "old": "gate > limit ? limit : gate",
        "new": "gate > limit ? limit : gate < -limit ? -limit : gate",
    },
    _CLAMPED | {
        "name": "up not clamped below",
        "old": "up < -limit ? -limit : up",
        "new": "up",
    },
    _CLAMPED | {
        "name": "up not clamped above",
        "old": "low > limit ? limit : low",
        "new": "low",
    },
    _CLAMPED | {
        "name": "the factor forgotten",
        "old": "kiln::sigmoid(kiln::mul_rn(alpha, g))",
        "new": "kiln::sigmoid(g)",
    },
    _CLAMPED | {
        "name": "the one forgotten",
        "old": "kiln::add_rn(u, 1.0f)",
        "new": "u",
    },
]  # fmt: skip
