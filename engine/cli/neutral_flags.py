"""vLLM's flags that are accepted because they say what Kiln does anyway."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import MappingProxyType

from kiln.engine.cli.parser import KilnParser
from kiln.engine.cli.vllm_flags import ABSENT

# Flag -> the values that mean what Kiln does anyway; none if it takes no value.
NEUTRAL: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--enable-auto-tool-choice": (),
        "--enable-chunked-prefill": (),
        "--enable-prefix-caching": (),
        "--async-scheduling": (),
        "--no-enforce-eager": (),
        "--no-trust-remote-code": (),
        "--no-enable-lora": (),
        "--disable-log-requests": (),
        "--no-enable-log-requests": (),
        "--disable-uvicorn-access-log": (),
        "--enable-request-id-headers": (),
        "--enable-prompt-tokens-details": (),
        "--exclude-tools-when-tool-choice-none": (),
        "--disable-frontend-multiprocessing": (),
        "--pipeline-parallel-size": ("1",),
        "--data-parallel-size": ("1",),
        "--api-server-count": ("1",),
        "--distributed-executor-backend": ("mp", "uni"),
        "--generation-config": ("auto",),
        "--tokenizer-mode": ("auto",),
        "--config-format": ("auto", "hf"),
        "--model-impl": ("auto",),
        "--runner": ("auto", "generate"),
        "--convert": ("auto", "none"),
        "--response-role": ("assistant",),
        "--chat-template-content-format": ("auto",),
        "--cpu-offload-gb": ("0",),
        "--max-logprobs": ("20",),
        "--logprobs-mode": ("raw_logprobs",),
    }
)


def add_neutral_flags(parser: argparse.ArgumentParser) -> None:
    """Accept the flags of vLLM's that mean what Kiln does anyway; the whole help lists them."""
    for name, values in NEUTRAL.items():
        number = None if values else 0  # None: one
        parser.add_argument(name, action=_Neutral, nargs=number, help=argparse.SUPPRESS)
    if isinstance(parser, KilnParser):
        shown = (" ".join((name, "|".join(values))).strip() for name, values in NEUTRAL.items())
        parser.small_print.append(
            "Of vLLM's flags, these are accepted because they say what Kiln does anyway: "
            f"{', '.join(shown)}."
        )


class _Neutral(argparse.Action):
    """Accepts only the values without effect."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Refuse another value."""
        name = str(option_string)
        wanted = NEUTRAL[name]
        if wanted and values not in wanted:
            fine = " and ".join(wanted)
            parser.error(f"Kiln has no {name} {str(values)[:80]!r}, only {fine}: {ABSENT[name]}")
