"""Pack kernel arguments as the driver reads them."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence

from kiln.jit_kernels.declare.parameters import KernelValue

_SLOT = 8  # bytes of one packed argument
_NUMBERS = frozenset({int, float, bool})
_FORMATS = {"pointer": "Q", "int64": "q", "int32": "i4x", "float": "f4x"}


class ArgumentBlock(threading.local):
    """A kernel's arguments, packed into memory that the driver reads at each launch.

    Each thread has its own block, because the driver reads it with the GIL released.
    """

    def __init__(self, c_types: Sequence[str]) -> None:
        self._packer = struct.Struct("=" + "".join(_FORMATS[kind] for kind in c_types))
        self._values = ctypes.create_string_buffer(_SLOT * len(c_types))
        start = ctypes.addressof(self._values)
        slots = [start + _SLOT * index for index in range(len(c_types))]
        self._pointers = (ctypes.c_void_p * len(c_types))(*slots)
        self.address = ctypes.addressof(self._pointers)  # the void** that the driver takes

    def pack(self, values: Sequence[KernelValue]) -> int:
        """Store the values (None: a null pointer); return the address of the array of pointers."""
        # Compare types: isinstance of a number and torch.Tensor takes a third of a microsecond.
        plain = [v if type(v) in _NUMBERS else v.data_ptr() if v is not None else 0 for v in values]  # type: ignore[union-attr]
        self._packer.pack_into(self._values, 0, *plain)
        return self.address
