"""Faults planted in the gated activation behind the product of a few rows; see test_faults.py."""

from functools import partial

from skinny_products import in_turn, planted

_HEADER, _TWO_TILES = {"header": "linear/gate.cuh"}, {"tiles": "2"}
_E4M3 = {"weight": "E4M3", "scaled": "kByBlock"}
_PLAIN = {"weight": "Plain", "scaled": "kNone", "input": "Plain"}

_GATES = [
    ("the activation of ups", "ACTIVATION(to_float(rounded[0])), to_float(rounded[1])",
     "ACTIVATION(to_float(rounded[1])), to_float(rounded[0])", _HEADER),
    ("gates that are not rounded", "ACTIVATION(to_float(rounded[0]))", "ACTIVATION(gate)", _HEADER),
    ("ups that are not rounded", "to_float(rounded[1]))", "up)", _HEADER),
    ("an activation of gelu", "ACTIVATION(to_float", "gelu_tanh(to_float", _HEADER),
    ("weights of gates for ups", "(more ? outputs : 0)", "(more ? 0 : 0)"),
    ("weights of the last up for those behind", "(more ? outputs : 0)",
     "(more ? outputs - (first + group >= outputs - 2) : 0)"),
    ("weights of ups at the distance of a block", "(more ? outputs : 0)",
     "(more ? min(outputs, 8) : 0)"),
    ("blocks at the distance of products", "kOfSet = kGated ? 8 : 16", "kOfSet = 16"),
    ("sums of the next gates for ups", "total_of(place + 8,", "total_of(place,"),
    ("sums of both sets side by side", "kGated ? column / 8 * 16 + column % 8 : column", "column",
     _TWO_TILES),
    ("the bias of gates for ups", "place + 8, n + outputs)", "place + 8, n)"),
    ("scales of gates for ups", "(high >> outputs_log2)", "(low >> outputs_log2)", _E4M3),
]  # fmt: skip


def _in_turn(name, old, new, *more, gate="silu"):
    needs = {**_PLAIN, "tiles": "1", "gate": gate}
    for one in more:
        needs |= {key: value for key, value in one.items() if key != "header"}
    own = {"kernel": f"skinny_gemm_{gate}_and_mul", "scenario": partial(in_turn, needs=needs)}
    return planted(needs["scaled"], name, old, new, own, *more)


FAULTS = [
    *(_in_turn(*fault) for fault in _GATES),
    _in_turn(
        "an activation of silu", "ACTIVATION(to_float", "silu(to_float", _HEADER, gate="gelu_tanh"
    ),
]
