"""Attention layers that run between the pieces of a captured step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kiln.engine.attention.context import AttentionStep, StepLayer
from kiln.engine.graphs.device import Between


class LayersBetween:
    """The attention layers of a step whose other operations are captured.

    Attention sees a batch as it is, without padding, so it may also plan on the host. ``keep``
    makes captured tensors safe to hold, see GraphDevice.
    """

    def __init__(
        self, layers: Sequence[StepLayer], keep: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._layers = layers
        self._keep = keep
        self._step: AttentionStep | None = None

    def begin(self, step: AttentionStep) -> None:
        """Set the step of the next replay."""
        self._step = step

    def layers(self, between: Between) -> list[StepLayer]:
        """Return layers each of which ends a piece, for a capture."""
        return [self._breaking(layer, between) for layer in self._layers]

    def _breaking(self, layer: StepLayer, between: Between) -> StepLayer:
        def end_piece(
            step: AttentionStep, qkv: torch.Tensor, positions: torch.Tensor, out: torch.Tensor
        ) -> None:
            tensors = [self._keep(tensor) for tensor in (qkv, positions, out)]
            between(lambda: self._attend(layer, tensors))

        return end_piece

    def _attend(self, layer: StepLayer, tensors: Sequence[torch.Tensor]) -> None:
        step = self._step
        assert step is not None, "begin comes first"
        used = len(step.metadata.slot_mapping)
        qkv, positions, out = (tensor[:used] for tensor in tensors)
        layer(step, qkv, positions, out)
