"""What makes drafts on the device, by ``method`` of a SpeculativeConfig."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kiln.engine.config import SpeculativeConfig, SpeculativeMethod
from kiln.engine.requests.batch import Batch
from kiln.engine.runner.inputs import StepInputs
from kiln.jit_kernels.ops.speculative.functions import propose_ngram

Propose = Callable[[Batch], None]
"""Writes ``inputs.drafts`` and ``inputs.num_drafts`` of a step's rows, behind its samples.

It runs on all ranks alike, and only behind steps that sample and want drafts. How many is in the
step's message.
"""


def _ngram(config: SpeculativeConfig, inputs: StepInputs) -> Propose:
    least, most = config.lookup

    def propose(batch: Batch) -> None:
        propose_ngram(
            inputs.drafts,
            inputs.num_drafts,
            message=inputs.message,
            seq_lens=inputs.seq_lens[: len(batch.requests)],
            rejected=inputs.rejected,
            sampled=inputs.sampled,
            token_pool=inputs.history.token_pool,
            tables=inputs.history.tables,
            block_size=inputs.block_size,
            prompt_lookup_max=most,
            prompt_lookup_min=least,
        )

    return propose


_MADE_BY: Mapping[SpeculativeMethod, Callable[[SpeculativeConfig, StepInputs], Propose]] = (
    MappingProxyType({"ngram": _ngram})
)


def proposer(config: SpeculativeConfig, inputs: StepInputs) -> Propose | None:
    """Return what makes the drafts of a config; None if there are none."""
    return None if config.method is None else _MADE_BY[config.method](config, inputs)
