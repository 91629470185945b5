"""The engines of a run: Kiln and a baseline, whose packages are imported only when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from kiln.engine.bench.engine import BenchEngine, MakeEngine, Tell
from kiln.engine.bench.kiln_engine import KilnEngine, MustFit
from kiln.engine.bench.vllm_engine import VLLMEngine
from kiln.engine.config import EngineConfig
from kiln.engine.runner.device import resolve_device


def kiln_and(
    baseline: str,
    python: str,
    config: EngineConfig,
    tell: Tell,
    room: MustFit | None = None,
    *,
    mixed: bool = False,
) -> dict[str, MakeEngine]:
    """Return Kiln and the engine that ``--baseline`` names; for "none" Kiln alone.

    ``python``: see VLLMEngine. ``room``: what must fit Kiln's KV pool. ``mixed``: the requests have
    several lengths. transformers then runs its continuous batching, on a CPU static batches of
    ``max_num_seqs`` requests; else it is ``generate`` on all requests at once.
    """

    def transformers() -> BenchEngine:
        from kiln.engine.bench import transformers_engine as made

        if not mixed:
            return made.StaticBatches(config)
        if resolve_device(config.model.device).type == "cuda":
            return made.ContinuousBatches(config)
        return made.StaticBatches(config, config.scheduler.max_num_seqs)

    makers: dict[str, MakeEngine] = {
        "kiln": lambda: KilnEngine(config, tell, room),
        "transformers": transformers,
        "vllm": lambda: VLLMEngine(config, python),
    }
    return {name: makers[name] for name in ("kiln", baseline) if name in makers}


def by_product(forms: Mapping[str, Mapping[str, MakeEngine]]) -> dict[str, MakeEngine]:
    """Return all forms of one product, then those of the next, by product and form.

    ``forms``: what is appended to a product's name -> the engines of that form.
    """
    first = next(iter(forms.values()))
    return {name + form: made[name] for name in first for form, made in forms.items()}
