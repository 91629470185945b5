"""vLLM's sampling settings that Kiln does not have: each is accepted at values without effect.

One that asks for something is refused by name, so that no setting is silently ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from kiln.engine.errors import RequestError

# Name to the values that ask for nothing. vLLM 0.22's keywords, and those of older versions.
NEUTRAL_SETTINGS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "best_of": (None, 1),
        "early_stopping": (None, False),
        "extra_args": (None, {}),
        "flat_logprobs": (None, False),
        "guided_decoding": (None,),
        "length_penalty": (None, 1, 1.0),
        "logits_processors": (None, []),
        "logprob_token_ids": (None,),
        "output_text_buffer_length": (None, 0),
        "prompt_logprob_start": (None,),
        "prompt_logprob_token_ids": (None,),
        "repetition_detection": (None,),
        "routed_experts_prompt_start": (None, 0),
        "spaces_between_special_tokens": (None, True),
        "stream_interval": (None, 1),
        "thinking_token_budget": (None, -1),
        "trace_decode_token_ids": (None,),
        "use_beam_search": (None, False),
    }
)
# How vLLM keeps settings or hands out outputs: any value gives the outputs of ``LLM``.
_WITHOUT_EFFECT = ("skip_clone", "skip_reading_prefix_cache")
_OUTPUT_KINDS = (None, "CUMULATIVE", "FINAL_ONLY")  # by name: the enumeration is vLLM's


def without_neutral(settings: Mapping[str, object], known: Iterable[str]) -> dict[str, object]:
    """Return the settings whose names are ``known``.

    Raises RequestError for another one that is not neutral, and for a name that vLLM lacks too.
    """
    names = frozenset(known)
    kept = {}
    for name, value in settings.items():
        if name in names:
            kept[name] = value
        elif name == "output_kind":
            _check(name, getattr(value, "name", value), _OUTPUT_KINDS)
        elif name in NEUTRAL_SETTINGS:
            _check(name, value, NEUTRAL_SETTINGS[name])
        elif name not in _WITHOUT_EFFECT:
            near = get_close_matches(name, [*names, *NEUTRAL_SETTINGS], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RequestError(f"{name[:80]} is not a sampling parameter{hint}", name[:80])
    return kept


def is_neutral(value: object, neutral: Iterable[object]) -> bool:
    """Whether a value is one of some; true is not 1."""
    return any(type(value) is type(one) and value == one for one in neutral)


def _check(name: str, value: object, neutral: tuple[object, ...]) -> None:
    if not is_neutral(value, neutral):
        allowed = " or ".join(map(repr, neutral))
        raise RequestError(f"{name} is not supported yet: leave it out, or give {allowed}", name)
