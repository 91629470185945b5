"""A safetensors file that is read without mapping it."""

from __future__ import annotations

import json
import os
from pathlib import Path

_LENGTH = 8  # bytes of the number at the start of a file: of the bytes of the JSON behind it


class TensorFile:
    """An open file, by its ``number``, and the places of its tensors.

    The library must have checked the header before. Raises OSError, ValueError.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            header = json.loads(file.read(length))
            self.number = os.dup(file.fileno())
        begin = _LENGTH + length
        self._places = {
            name: (begin + entry["data_offsets"][0], begin + entry["data_offsets"][1])
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def place(self, name: str, num_bytes: int) -> tuple[int, int]:
        """Return where a tensor of known size begins and ends, in bytes. Raises ValueError."""
        begin, end = self._places.get(name, (0, -1))
        if end - begin != num_bytes:
            raise ValueError("the file has changed since it was opened")
        return begin, end

    def close(self) -> None:
        """Close the file."""
        os.close(self.number)
