"""The launcher protocol: load cubins, launch kernels."""

from __future__ import annotations

from typing import Any, Protocol

from kiln.jit_kernels.declare.spec import LaunchGeometry


class Launcher(Protocol):
    """Loads cubins into the current CUDA context and launches their kernels.

    ``name`` is the value of ``KILN_LAUNCHER`` that selects it.
    """

    name: str

    def load(
        self, name: str, cubin: bytes, entry: str, shared_bytes: int = 0, *, early_hint: str = ""
    ) -> Any:
        """Return the kernel ``entry`` of a cubin. The module stays loaded.

        ``shared_bytes``: the largest dynamic shared memory of a launch. ``early_hint``: see
        ``template.early_launch_hint``. Raises LaunchError.
        """

    def launch(
        self, name: str, function: Any, geometry: LaunchGeometry, arguments: int, stream: int
    ) -> None:
        """Queue a function that ``load`` returned on a stream.

        ``arguments`` is the address of an array with a pointer to each argument. ``stream`` is a
        CUstream. Raises LaunchError.
        """

    def at_graph_edge(self, stream: int) -> None:
        """Hear that a capture begins or ends on a stream, or that a graph was replayed there.

        A captured launch runs only with its graph, and a replay's launches are unseen. So what was
        launched last on the stream, a CUstream, is no longer known.
        """
