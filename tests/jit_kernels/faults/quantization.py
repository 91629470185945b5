"""Faults planted in the kernels that quantise; see test_faults.py.

What they share with the norms, the rows, is faulty there.
"""

_FP8 = {"scalar_t": "kiln::bf16", "quant_t": "kiln::e4m3"}
_INT8 = {"scalar_t": "kiln::bf16", "quant_t": "int8_t"}
_CODES, _GATED = "quantization/quantize.cuh", "quantization/gated_rows.cuh"
_RMS = "kiln/rows/rms.cuh"

_GROUPS = [{"rows": 5, "d": 256, "group": 128, "gap": 16, "column_major": 1}]
_GIVEN = [{"rows": 4, "d": 192, "given": 1, "gap": 8}]
_GIVEN_ODD = [{"rows": 2, "d": 129, "gap": 1, "given": 1}]
_ODD = [{"rows": 2, "d": 129, "gap": 1}]
_TALL = [{"rows": 1, "d": 16392}]
_WIDE_GROUPS = [{"rows": 1, "d": 16512, "group": 128}]
_EVEN = [{"rows": 34, "d": 60, "gap": 4}]
_CODE_GAP = [{"rows": 3, "d": 2048, "code_gap": 4}]
_MAXIMA = [{"rows": 3, "d": 40, "given": 1, "maxima": 1}]
_WIDE = [{"rows": 2, "d": 4104, "gap": 8, "offset": 1}]

FAULTS = [
    {"kernel": "quantize", "needs": _FP8, "header": _CODES, **fault}
    for fault in [
        {
            "name": "scales of groups apart by one",
            "old": "at / kGroup * group_stride",
            "new": "at / kGroup",
            "sizes": _GROUPS,
        },
        {
            "name": "half of a group left out",
            "old": "int m = 4; m; m >>= 1",
            "new": "int m = 2; m; m >>= 1",
            "sizes": _GROUPS,
        },
        {
            "name": "the scale of the group before",
            "old": "v / 2 * 8 + v % 2, kLanes",
            "new": "0, kLanes",
            "sizes": [{"rows": 2, "d": 2176, "group": 128}],
        },
        {
            "name": "the scale of another row's group",
            "old": "v / 2 * 8 + v % 2, kLanes",
            "new": "v / 2 * 8 + v % 2",
            "sizes": [{"rows": 5, "d": 128, "group": 128}],
        },
        {
            "name": "a row of zeros divided by zero",
            "old": "const float enough = small && scale < least ? least : scale;",
            "new": "const float enough = scale;",
            "sizes": _ODD,
        },
        {
            "name": "dropped tail of the codes",
            "old": "const int64_t end = size < start + step ? size : start + step;",
            "new": "const int64_t end = size < start + step ? size - 1 : start + step;",
            "sizes": _WIDE_GROUPS,
        },
        {
            "name": "codes of the elements before them",
            "old": "codes[i] = Code<Q>::one(",
            "new": "codes[i ? i - 1 : 0] = Code<Q>::one(",
            "sizes": _EVEN,
        },
        {
            "name": "the scale of another step of a row's groups",
            "old": "const int64_t i = start + first_chunk<T>();",
            "new": "const int64_t i = first_chunk<T>();",
            "sizes": _WIDE_GROUPS,
        },
        {
            "name": "a row's scale from each of its groups",
            "old": "if (!grouped) return team_largest(largest, partial);",
            "new": "if (!grouped) return largest;",
            "sizes": _TALL,
        },
        {
            "name": "misaligned codes",
            "old": "return misalignment_of(out, out_stride) * (16 / Codes<T, Q>::kSize);",
            "new": "return 0;",
            "sizes": _CODE_GAP,
        },
        {
            "name": "the given scale not returned",
            "old": "if (index == 0 && threadIdx.x == 0) scales[0] = given;",
            "new": "",
            "sizes": _GIVEN,
        },
        {
            "name": "multiplied by the scale",
            "old": "      return rcp_rn(given);\n",
            "new": "      return given;\n",
            "sizes": _GIVEN,
        },
        {
            "name": "multiplied by the scale in rows that are not aligned",
            "old": "is_given ? as_uint(rcp_rn(given)) : 0;",
            "new": "is_given ? as_uint(given) : 0;",
            "sizes": _GIVEN_ODD,
        },
        {
            "name": "signed maxima",
            "old": "as_uint(x) & 0x7fffffff",
            "new": "as_uint(x)",
            "sizes": _ODD,
        },
        {
            "name": "the scale of another format",
            "old": "kLargest = 448.0f",
            "new": "kLargest = 240.0f",
            "sizes": _ODD,
        },
        {
            "name": "integers that wrap",
            "old": "code < -128 ? -128 : code > 127 ? 127 : code",
            "new": "code",
            "needs": _INT8,
            "sizes": _GIVEN,
        },
        {
            "name": "rounded the other way",
            "old": "mul_rn(some[k], inverse)",
            "new": "div_rn(some[k], rcp_rn(inverse))",
        },
        {
            "name": "maxima of the first lanes alone",
            "old": "i < num_maxima; i += 128",
            "new": "i < min(num_maxima, 128); i += 128",
            "header": "",
            "sizes": _MAXIMA,
        },
        {
            "name": "half of the lanes' maxima",
            "old": "int m = 16; m; m >>= 1",
            "new": "int m = 8; m; m >>= 1",
            "header": "",
            "sizes": _MAXIMA,
        },
    ]
] + [
    {
        "kernel": "rms_norm_quant",
        "name": "dropped barrier between the maxima and their reading",
        "old": "= x;\n  __syncthreads();\n  return warp_largest",
        "new": "= x;\n  __syncwarp();\n  return warp_largest",
        "header": "kiln/rows/rows.cuh",
        "needs": _INT8,
        "sizes": _WIDE,
    },
    {
        "kernel": "rms_norm_quant",
        "name": "one array for sums and maxima",
        "old": "scale ? *scale : 0.0f, largest}",
        "new": "scale ? *scale : 0.0f, reinterpret_cast<kiln::Partial<uint32_t>&>(partial)}",
        "needs": _FP8,
        "seeds": 20,
        "sizes": _WIDE,
    },
    {
        "kernel": "rms_norm_quant",
        "name": "half of a team of a warp left out of the sum",
        "old": "    x = add_rn(x, y);\n",
        "new": "",
        "header": "kiln/rows/rows.cuh",
        "needs": _FP8,
        "sizes": [{"rows": 4, "d": 256, "gap": 8}],
    },
    {
        "kernel": "rms_norm_quant",
        "name": "half of a team's warps left out of the sum",
        "old": "return sum_warps(partial, 2 * warps);",
        "new": "return sum_warps(partial, warps);",
        "header": "kiln/rows/rows.cuh",
        "needs": _FP8,
        "sizes": _WIDE,
    },
    {
        "kernel": "rms_norm_quant",
        "name": "the other two chunks' groups",
        "old": "threadIdx.x / 8 % 2 * 2",
        "new": "(1 - threadIdx.x / 8 % 2) * 2",
        "header": _CODES,
        "needs": _FP8,
        "sizes": [{"rows": 2, "d": 2176, "group": 128}],
    },
    {
        "kernel": "fused_add_rms_norm_quant",
        "name": "sum not stored",
        "old": "if (ADD) store_part(row.part, residual + index * residual_stride, size);",
        "new": "",
        "header": _RMS,
        "needs": _FP8,
        "sizes": _WIDE,
    },
    {
        "kernel": "silu_and_mul_quant",
        "name": "gate taken for up",
        "old": "Load{both.up, gate + d}",
        "new": "Load{both.up, gate}",
        "header": _GATED,
        "needs": _FP8,
        "sizes": _GIVEN,
    },
    {
        "kernel": "silu_and_mul_quant",
        "name": "gate taken for up in rows that are not aligned",
        "old": "return {gate, gate + d};",
        "new": "return {gate, gate};",
        "header": _GATED,
        "needs": _FP8,
        "sizes": _ODD,
    },
    {
        "kernel": "tensor_amax",
        "name": "rows of other parts",
        "old": "row += ROWS * gridDim.x",
        "new": "row += ROWS",
    },
    {
        "kernel": "tensor_amax",
        "name": "one row for four",
        "old": "++r, p += gridDim.x * stride)",
        "new": "++r)",
    },
    {
        "kernel": "tensor_amax",
        "name": "rows past the last",
        "old": "if (r == 0 || row + r * gridDim.x < rows)",
        "new": "",
    },
    {
        "kernel": "tensor_amax",
        "name": "rows that are not aligned left out",
        "old": "largest_of_elements(x, rows, d, x_stride)",
        "new": "0",
    },
    {
        "kernel": "tensor_amax",
        "name": "misaligned vectors",
        "old": "odd % 16 ",
        "new": "false ",
    },
    {
        "kernel": "tensor_amax",
        "name": "the first threads' columns alone",
        "old": "i < d; i += kiln::team_span<SCALAR_T>()",
        "new": "i < min(d, int64_t(kiln::team_span<SCALAR_T>())); i += kiln::team_span<SCALAR_T>()",
    },
]
