"""How one request wants its tokens drawn, with vLLM's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kiln.engine.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256  # characters of one stop string: it bounds how much text is held back
MAX_SEED = 2**63 - 1
MAX_BIASES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024  # entries
MAX_BIAS = 100.0  # OpenAI's range


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request; validated when made.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 keeps every token. ``max_tokens`` None generates
    up to the model's context. ``logprobs`` is how many of the most likely tokens are reported
    beside the drawn one (0 reports the drawn one alone; None reports nothing). ``seed`` None
    draws a seed at admission. ``logit_bias`` adds to the logits of token ids. Then the logits of
    tokens of prompt or output are divided by ``repetition_penalty`` where positive, multiplied
    where negative; those of tokens of the output lose ``frequency_penalty`` for each time and
    ``presence_penalty`` once. Raises RequestError naming the field that is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] | str | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        """Normalise the stop lists to tuples and check every range."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        self._check_types()
        self._check("temperature", 0 <= self.temperature <= 100, "between 0 and 100")
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._check("top_k", self.top_k >= -1, "-1 or 0 (every token) or a positive count")
        self._check("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(name, -2 <= getattr(self, name) <= 2, "between -2 and 2")
        fits = 0 < self.repetition_penalty <= 10
        self._check("repetition_penalty", fits, "above 0 and at most 10")
        self._check_biases()
        self._check("n", 1 <= self.n <= 8, "between 1 and 8")
        self._check("min_tokens", self.min_tokens >= 0, "0 or more")
        if self.max_tokens is not None:
            self._check("max_tokens", self.max_tokens >= 1, "1 or more")
            self._check("min_tokens", self.min_tokens <= self.max_tokens, "at most max_tokens")
        if self.seed is not None:
            self._check("seed", -MAX_SEED <= self.seed <= MAX_SEED, "a 64-bit integer")
        if self.logprobs is not None:
            self._check("logprobs", 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
        self._check("stop", len(stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings")
        fits = all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH for s in stop)
        self._check("stop", fits, f"strings of 1 to {MAX_STOP_LENGTH} characters")
        ids = all(type(i) is int and i >= 0 for i in self.stop_token_ids or ())
        self._check("stop_token_ids", ids, "a list of token ids, 0 or more")

    def _check_biases(self) -> None:
        biases = self.logit_bias
        fits = biases is None or (isinstance(biases, Mapping) and len(biases) <= MAX_BIASES)
        self._check("logit_bias", fits, f"a map of at most {MAX_BIASES} token ids")
        fits = all(type(token) is int and token >= 0 for token in biases or ())
        self._check("logit_bias", fits, "a map from token ids, 0 or more")
        fits = all(_is_number(bias) and abs(bias) <= MAX_BIAS for bias in (biases or {}).values())
        self._check("logit_bias", fits, "a map to numbers between -100 and 100")

    def _check_types(self) -> None:
        """Refuse a string, a bool or a NaN where a number is wanted."""
        numbers = ("temperature", "top_p", "min_p")
        for name in (*numbers, "presence_penalty", "frequency_penalty", "repetition_penalty"):
            self._check(name, _is_number(getattr(self, name)), "a number")
        for name in ("top_k", "n", "min_tokens"):
            self._check(name, type(getattr(self, name)) is int, "an integer")
        for name in ("seed", "max_tokens", "logprobs"):
            value = getattr(self, name)
            self._check(name, value is None or type(value) is int, "an integer or null")

    def _check(self, name: str, fine: bool, wanted: str) -> None:
        if not fine:
            shown = repr(getattr(self, name))[:80]
            raise RequestError(f"{name} must be {wanted}, got {shown}", param=name)

    @property
    def penalizes(self) -> bool:
        """Whether what was generated so far changes what may come next."""
        neutral = not self.presence_penalty and not self.frequency_penalty
        return not neutral or self.repetition_penalty != 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return tuple(self.stop or ())

    def for_answer(self, index: int) -> SamplingParams:
        """Return the settings of one of the ``n`` answers: alone, with the seed plus ``index``."""
        if self.n == 1:
            return self
        seed = self.seed
        if seed is not None:  # the sum wraps round within the range of seeds
            seed = (seed + index + MAX_SEED) % (2 * MAX_SEED + 1) - MAX_SEED
        return self.replace(n=1, seed=seed)

    def replace(self, **changes: object) -> SamplingParams:
        """Return a copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    """Whether a value is a number: not a bool, not NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
