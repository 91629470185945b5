"""Faults planted in the rotary kernels; see test_faults.py."""

FAULTS = [
    {
        "kernel": "apply_rotary",
        "name": "dropped tail",
        "old": "pair < pairs;",
        "new": "pair < pairs - 1;",
    },
    {
        "kernel": "apply_rotary",
        "name": "tail past the end",
        "old": "pair < pairs;",
        "new": "pair <= pairs;",
    },
    {
        "kernel": "apply_rotary",
        "name": "wrong sign",
        "old": "a * c - b * s",
        "new": "a * c + b * s",
    },
    {
        "kernel": "apply_rotary",
        "name": "wrong row of the table",
        "old": "positions[token] * 2",
        "new": "token * 2",
    },
    {
        "kernel": "apply_rotary",
        "name": "reads what it has just written",
        "old": "b * c + a * s",
        "new": "b * c + kiln::to_float(x[i]) * s",
    },
    {
        "kernel": "apply_rotary",
        "name": "wrong key head",
        "old": "(head - query_heads) *",
        "new": "head *",
    },
    {
        "kernel": "apply_rotary",
        "name": "halves side by side",
        "old": "x[half + i]);\n      const",
        "new": "x[i + 1]);\n      const",
    },
]
