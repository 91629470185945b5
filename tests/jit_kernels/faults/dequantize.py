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
    _fault(
        "U4", "the zero point of the row before", "zeros[scale_at + g] : zero", "zeros[g] : zero"
    ),
    _fault("U4", "the scale of the first group for all", "begin / group : 0", "0 : 0"),
    _fault(
        "U4",
        "the order of another expert",
        "group_of[int64_t(expert) * d + begin",
        "group_of[begin",
    ),
    _fault("U4", "the order of the inputs ignored", "!group_of && group", "group"),
    _fault("U4", "small groups taken for large ones", "group % kElements == 0", "group > 0"),
    _fault(
        "U4",
        "rows from the first on",
        "int(row - expert * rows) + first",
        "int(row - expert * rows)",
    ),
    _fault("U4", "rows of another expert", "int64_t(expert) * all_rows", "int64_t(expert) * rows"),
    _fault(
        "U4",
        "the high bits first",
        "i / 2 * 4 + i % 2 * 16",
        "i % 2 * 4 + i / 2 * 16",
    ),
    _fault("U4", "the zero point not subtracted", "int(code) - zero", "int(code)", _HEADER),
    _fault("E4M3", "a scale for each row of a block", "source >> rows_log2", "source"),
    _fault("E4M3", "columns behind the scales forgotten", "* scale_columns;", "* (d / group);"),
    _fault("S8", "codes without a sign", "float(int8_t(code))", "float(code)", _HEADER),
    _fault("E2M1", "codes without a sign", "code & 8 ? -twice : twice", "twice", _HEADER),
    _fault(
        "E2M1",
        "subnormal codes as normal ones",
        "exponent ? (2 + fraction)",
        "true ? (2 + fraction)",
        _HEADER,
    ),
    _fault("E2M1", "the smallest scale is zero", "1u << 22", "0u", "kiln/math/exact.cuh"),
]
