"""What a launcher does."""

from __future__ import annotations

from typing import Any, Protocol

from kiln.jit_kernels.spec import LaunchGeometry


class Launcher(Protocol):
    """Loads cubins into the current CUDA context, and launches their kernels.

    ``name`` is its value of ``KILN_LAUNCHER``.
    """

    name: str

    def load(
        self, name: str, cubin: bytes, entry: str, shared_bytes: int = 0, *, opening: str = ""
    ) -> Any:
        """Return the kernel ``entry`` of a cubin; it stays loaded.

        ``shared_bytes``: the most dynamic shared memory that a launch asks for. ``opening``: what
        the kernel begins with so that it may be launched before the one ahead of it in its stream
        has ended (kiln/ptx/launch.cuh). Raises LaunchError.
        """

    def launch(
        self, name: str, function: Any, geometry: LaunchGeometry, arguments: int, stream: int
    ) -> None:
        """Queue what ``load`` returned on a stream.

        ``arguments`` is the address of an array of pointers, one to each argument; ``stream`` a
        CUstream. Raises LaunchError.
        """
