"""The tables from vLLM's flags: accepted without effect, and absent with what to do instead."""

from __future__ import annotations

from doc_tables.markdown import code, sentence, table
from kiln.engine.cli.neutral_flags import NEUTRAL
from kiln.engine.cli.vllm_flags import ABSENT


def neutral_flags() -> str:
    """Return the flags that say what Kiln does anyway, with the values for which that is so."""
    rows = ((code(name), code(*values) if values else "") for name, values in NEUTRAL.items())
    return table(("vLLM's flag", "accepted values"), rows)


def absent_flags() -> str:
    """Return the flags that Kiln lacks, in groups of one reason, and what to do instead."""
    reasons: dict[str, list[str]] = {}
    for name, reason in ABSENT.items():
        reasons.setdefault(reason, []).append(name)
    rows = ((code(*names), sentence(reason)) for reason, names in reasons.items())
    return table(("vLLM's flag", "in Kiln"), rows)
