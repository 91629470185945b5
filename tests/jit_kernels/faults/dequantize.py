"""Faults planted in the kernel that turns codes of weights to floats; see test_faults.py."""

_NEEDS = {"scalar_t": "kiln::bf16"}
_HEADER = "dequantize/codes.cuh"


def _fault(code: str, name: str, old: str, new: str, header: str = "") -> dict[str, object]:
    needs = {**_NEEDS, "code": code}
    return {
        "kernel": "dequantize", "needs": needs, "name": name, "old": old, "new": new,
        "header": header,
    }  # fmt: skip


FAULTS = [
    _fault("U4", "the zero point of the first row", "w.zeros + scale :", "w.zeros :"),
    _fault("U4", "the scale of the first group for all", "i >> group_log2", "0"),
    _fault("U4", "groups of any size taken for the first", "i / group :", "0 :"),
    _fault("U4", "the order of another expert", "w.group_of + expert * w.d", "w.group_of"),
    _fault("U4", "the order of the inputs ignored", "!group_of && group", "group"),
    _fault("U4", "small groups taken for large ones", "group % kElements == 0", "group > 0"),
    _fault("U4", "rows from the first on", "uint32_t(w.rows)) + w.first", "uint32_t(w.rows))"),
    _fault(
        "U4",
        "rows of another expert",
        "(expert * w.all_rows + source)",
        "(expert * w.rows + source)",
    ),
    _fault("U4", "the first row for all", "++row;\n    find(w);", "++row;"),
    _fault("U4", "the first piece for all", "column += kThreads;", ""),
    _fault("U4", "pieces behind the last", "if (i * kThreads < left) loaded", "loaded"),
    _fault(
        "U4",
        "the high bits first",
        "i / 2 * 4 + i % 2 * 16",
        "i % 2 * 4 + i / 2 * 16",
    ),
    _fault(
        "U4", "the zero point not subtracted", "add_rn(float(zero), 0x1p23f)", "0x1p23f", _HEADER
    ),
    _fault("E4M3", "a scale for each row of a block", "source >> w.rows_log2", "source"),
    _fault(
        "E4M3", "columns behind the scales forgotten", "* w.scale_columns;", "* (w.d / w.group);"
    ),
    _fault("S8", "codes without a sign", "code ^ 0x80", "code", _HEADER),
    _fault("E2M1", "codes without a sign", "(code & 8) << 28 | ", "", _HEADER),
    _fault(
        "E2M1", "subnormal codes as zero", "(code & 7) <<", "(code & 6 ? code & 7 : 0) <<", _HEADER
    ),
    _fault("E2M1", "the smallest scale is zero", "1u << 22", "0u", "kiln/math/exact.cuh"),
]
