"""The interface of a measured engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kiln.engine.config import EngineConfig
from kiln.engine.errors import KilnError

Tell = Callable[[str], None]  # gets a text that says what is running now
Adapters = Sequence[str | None] | None  # the name of each request's adapter; None: the base model


class BenchError(KilnError):
    """An engine failed, or did not do what it was asked to do: nothing to compare."""


class BenchEngine(ABC):
    """A loaded model that generates tokens, in this process or in another.

    ``name`` is shown in every row; ``product`` is the same with and without LoRA adapters.
    ``load_seconds`` is the time from the start to the first request. ``versions`` are those of its
    packages, beside Kiln's, which every report names. ``adapters`` are the names of those that it
    loaded; without any it is built for none. ``lora_backend``: what computes the adapters' parts,
    if known. ``token_budget`` is the most tokens of a step, if known, and ``own_budget`` says that
    it is the engine's own default, not one that was asked for.
    """

    name: str
    product: str
    load_seconds: float
    versions: Mapping[str, str] = {}
    adapters: Sequence[str] = ()
    lora_backend: str | None = None
    token_budget: int | None = None
    own_budget: bool = False

    def __init__(self, config: EngineConfig) -> None:
        self.own_budget = config.scheduler.max_num_batched_tokens is None
        self.adapters = tuple(module.name for module in config.lora.modules)
        self.name = f"{self.product} with LoRA" if self.adapters else self.product

    @abstractmethod
    def run(self, prompts: list[list[int]], lengths: list[int], adapters: Adapters = None) -> float:
        """Generate exactly ``lengths`` tokens for the prompts, greedily; return the seconds.

        Raises BenchError.
        """

    def step_details(
        self, prompts: list[list[int]], skipped: int, steps: int, adapters: Adapters = None
    ) -> dict[str, Any]:
        """Return more fields of a decode step's row: those that this engine can measure.

        They are means over ``steps`` steps after the first ``skipped`` output tokens.
        """
        return {}

    def device_ms(self, prompts: list[list[int]], lengths: list[int]) -> float | None:
        """Generate as ``run`` does; return how long the GPU works, None if that is not known."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Free the model's memory."""


MakeEngine = Callable[[], BenchEngine]


def check_lengths(name: str, made: list[int], lengths: list[int]) -> None:
    """Raise BenchError if an engine generated more or fewer tokens than asked."""
    wrong = [pair for pair in zip(made, lengths, strict=True) if pair[0] != pair[1]]
    if wrong:
        got, asked = wrong[0]
        raise BenchError(
            f"{name}: {len(wrong)} of {len(lengths)} requests have the wrong number of tokens, "
            f"such as {got} instead of {asked}"
        )
