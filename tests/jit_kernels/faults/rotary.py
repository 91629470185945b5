"""Faults planted in the rotary kernels; see test_faults.py."""

FAULTS = [
    {"kernel": "apply_rotary", **fault}
    for fault in [
        {
            "name": "dropped tail",
            "old": "pair < heads.num_all * half;",
            "new": "pair < heads.num_all * half - 1;",
        },
        {
            "name": "tail past the end",
            "old": "pair < heads.num_all * half;",
            "new": "pair <= heads.num_all * half;",
        },
        {
            "name": "wrong sign",
            "old": "sub_rn(mul_rn(a, c), mul_rn(b, s))",
            "new": "add_rn(mul_rn(a, c), mul_rn(b, s))",
            "header": "kiln/rows/rotate.cuh",
        },
        {
            "name": "wrong row of the table",
            "old": "table + position * 2",
            "new": "table + token * 2",
        },
        {
            "name": "reads what it has just written",
            "old": "kiln::rotated_second(a, b, row",
            "new": "kiln::rotated_second(kiln::to_float(x[i]), b, row",
        },
        {
            "name": "wrong key head",
            "old": "(head - num_query) *",
            "new": "head *",
        },
        {
            "name": "halves side by side",
            "old": "x[half + i]);\n    kiln",
            "new": "x[i + 1]);\n    kiln",
        },
        {
            "name": "vectors that are not aligned",
            "old": "return steps % Chunk::kSize == 0 &&",
            "new": "return",
        },
        {
            "name": "halves that are not whole vectors",
            "old": "half != blockDim.x * Chunk::kSize ||",
            "new": "",
        },
        {
            "name": "last head dropped",
            "old": "if (head >= all.num_all) return;",
            "new": "if (head + 1 >= all.num_all) return;",
        },
        {
            "name": "second head dropped",
            "old": "if (two) second.store_rotated",
            "new": "if (false) second.store_rotated",
        },
        {
            "name": "second heads past the last",
            "old": "other < all.num_all",
            "new": "true",
        },
        {
            "name": "heads past the last",
            "old": "if (head >= all.num_all) return;",
            "new": "",
        },
        {
            "name": "first heads again in a token's second block",
            "old": "head = blockIdx.y * blockDim.y + threadIdx.y",
            "new": "head = threadIdx.y",
        },
        {
            "name": "sines for cosines",
            "old": "angles.load(row + i, row + half + i)",
            "new": "angles.load(row + half + i, row + i)",
        },
    ]
]
