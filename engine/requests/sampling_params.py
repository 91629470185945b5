"""The sampling parameters of a request, with vLLM's names."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kiln.engine.errors import RequestError
from kiln.engine.requests.neutral_settings import without_neutral
from kiln.engine.requests.structured_outputs import StructuredOutputsParams

MAX_COUNT = 2**31 - 1  # largest integer except a seed: it fits messages and kernels
MAX_SEED = 2**63 - 1
MAX_ANSWERS = 128  # OpenAI's limit
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256  # bounds the text held back
MAX_STOP_TOKEN_IDS = 1024  # each is a logit edit in every step before min_tokens
MAX_LOGIT_BIAS = 1024  # entries
MAX_BAD_WORDS = 1024  # each is compared with the output in every step
MAX_BAD_WORD_TOKENS = 64
MAX_BIAS = 100.0  # OpenAI's range
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0  # OpenAI's range
MIN_REPETITION_PENALTY = 0.01  # much smaller values make logits infinite
MAX_REPETITION_PENALTY = 10.0
_SHOWN_BITS = 256  # of an integer in an error message


class _AllKeywords(type):
    """Lets a dataclass accept vLLM's keywords that it has no field for, at neutral values.

    Fields for them would make every message to the engine longer.
    """

    def __call__(cls, *values: Any, **settings: Any) -> Any:
        names = (field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
        return super().__call__(*values, **without_neutral(settings, names))


@dataclass(frozen=True, slots=True)
class SamplingParams(metaclass=_AllKeywords):
    """Sampling settings of one request, validated on construction.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 keeps all tokens. ``max_tokens`` None generates
    up to the model's context. ``logprobs`` is the number of most likely tokens to report besides
    the sampled one; 0 reports only the sampled one, None nothing; ``prompt_logprobs`` does so for
    the tokens of the prompt. ``seed`` None picks one at
    random. ``logit_bias`` is added to the logits of token ids. Then, for tokens in prompt or
    output, positive logits are divided and negative ones multiplied by ``repetition_penalty``. For
    tokens in the output, ``frequency_penalty`` times the number of occurrences and
    ``presence_penalty`` once are subtracted. Only ``allowed_token_ids`` are sampled, and no token
    that would complete one of ``bad_words``, or of ``bad_words_token_ids``, which a tokenizer makes
    of them. ``detokenize`` false leaves the text empty. ``truncate_prompt_tokens`` keeps that many
    tokens at the end of the prompt, -1 as many as fit the context with one more.
    ``structured_outputs`` says what the output must look like. vLLM's other
    keywords are accepted at values without effect. Raises RequestError naming a field that is out
    of range, not supported, or unknown.
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
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        """Normalise the stop lists to tuples and check every range."""
        self._check("stop", _is_list(self.stop) or isinstance(self.stop, str), "texts")
        self._check("stop_token_ids", _is_list(self.stop_token_ids), "a list of token ids")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        self._check_types()
        self._check_within("temperature", 0.0, MAX_TEMPERATURE)
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        counts = f"-1 or 0 (every token) or a count, at most {MAX_COUNT}"
        self._check("top_k", -1 <= self.top_k <= MAX_COUNT, counts)
        self._check_within("min_p", 0, 1)
        for name in ("presence_penalty", "frequency_penalty"):
            self._check_within(name, -MAX_PENALTY, MAX_PENALTY)
        self._check_within("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        self._check_within("n", 1, MAX_ANSWERS)
        self._check_at_least("min_tokens", 0)
        if self.max_tokens is not None:
            self._check_at_least("max_tokens", 1)
            self._check("min_tokens", self.min_tokens <= self.max_tokens, "at most max_tokens")
        if self.seed is not None:
            self._check("seed", -MAX_SEED <= self.seed <= MAX_SEED, "a 64-bit integer")
        if self.logprobs is not None:
            self._check("logprobs", 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
        if self.prompt_logprobs is not None:
            fits = 0 <= self.prompt_logprobs <= MAX_LOGPROBS
            self._check("prompt_logprobs", fits, f"0 to {MAX_LOGPROBS}")
        if self.truncate_prompt_tokens is not None:
            self._check_at_least("truncate_prompt_tokens", -1)
            self._check("truncate_prompt_tokens", self.truncate_prompt_tokens != 0, "-1 or a count")
        if self.structured_outputs is not None:
            read = StructuredOutputsParams.of(self.structured_outputs)
            object.__setattr__(self, "structured_outputs", read)
        if not self.detokenize:
            self._check("detokenize", not self.stop, "true with stop strings")
        self._check_lists()

    def _check_lists(self) -> None:
        """Check lengths before elements: only the size of the request body limits a list."""
        stop, ids, biases = self.stop_strings, self.stop_token_ids or (), self.logit_bias
        self._check("stop", len(stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings")
        fits = all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_STRING_CHARS for s in stop)
        self._check("stop", fits, f"strings of 1 to {MAX_STOP_STRING_CHARS} characters")
        for each in stop:
            check_surrogates(each, "a stop string", "stop")
        fits = len(ids) <= MAX_STOP_TOKEN_IDS
        self._check("stop_token_ids", fits, f"at most {MAX_STOP_TOKEN_IDS} token ids")
        wanted = f"token ids, 0 to {MAX_COUNT}"
        self._check("stop_token_ids", all(map(_is_token_id, ids)), f"a list of {wanted}")
        self._check_restrictions(wanted)
        if biases is None:
            return
        fits = isinstance(biases, Mapping) and len(biases) <= MAX_LOGIT_BIAS
        self._check("logit_bias", fits, f"a map of at most {MAX_LOGIT_BIAS} token ids")
        self._check("logit_bias", all(map(_is_token_id, biases)), f"a map from {wanted}")
        fits = all(_is_number(bias) and abs(bias) <= MAX_BIAS for bias in biases.values())
        self._check("logit_bias", fits, "a map to numbers between -100 and 100")

    def _check_restrictions(self, wanted: str) -> None:
        """Check what must be sampled and what must not. ``wanted`` describes token ids."""
        allowed, words, ids = self.allowed_token_ids, self.bad_words, self.bad_words_token_ids
        if allowed is not None:
            fits = _is_list(allowed) and len(allowed) > 0 and all(map(_is_token_id, allowed))
            self._check("allowed_token_ids", fits, f"null or a list of {wanted}, at least one")
        if words is not None:
            fits = _is_list(words) and len(words) <= MAX_BAD_WORDS
            self._check("bad_words", fits, f"a list of at most {MAX_BAD_WORDS} texts")
            fits = all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_STRING_CHARS for s in words)
            self._check("bad_words", fits, f"texts of 1 to {MAX_STOP_STRING_CHARS} characters")
            for each in words:
                check_surrogates(each, "a bad word", "bad_words")
        if ids is not None:
            fits = _is_list(ids) and len(ids) <= 2 * MAX_BAD_WORDS and all(map(_is_word, ids))
            shape = f"a list of lists of 1 to {MAX_BAD_WORD_TOKENS} {wanted}"
            self._check("bad_words_token_ids", fits, shape)

    def _check_types(self) -> None:
        """Reject strings, bools and NaN for numbers."""
        numbers = ("temperature", "top_p", "min_p")
        for name in (*numbers, "presence_penalty", "frequency_penalty", "repetition_penalty"):
            self._check(name, _is_number(getattr(self, name)), "a number")
        for name in ("top_k", "n", "min_tokens"):
            self._check(name, type(getattr(self, name)) is int, "an integer")
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
            value = getattr(self, name)
            self._check(name, value is None or type(value) is int, "an integer or null")

    def _check_within(self, name: str, least: float, most: float) -> None:
        fits = least <= getattr(self, name) <= most
        self._check(name, fits, f"between {least:.10g} and {most:.10g}")

    def _check_at_least(self, name: str, least: int) -> None:
        self._check(name, getattr(self, name) >= least, f"{least} or more")
        self._check(name, getattr(self, name) <= MAX_COUNT, f"at most {MAX_COUNT}")

    def _check(self, name: str, fine: bool, wanted: str) -> None:
        if not fine:
            message = f"{name} must be {wanted}, got {shown(getattr(self, name))}"
            raise RequestError(message, param=name)

    @property
    def penalizes(self) -> bool:
        """Whether any penalty on repeated tokens is active."""
        neutral = not self.presence_penalty and not self.frequency_penalty
        return not neutral or self.repetition_penalty != 1

    @property
    def is_plain(self) -> bool:
        """Whether nothing edits the logits, stop tokens aside, or asks for log-probabilities."""
        return (
            not (self.penalizes or self.logit_bias)
            and self.logprobs is None
            and not (self.allowed_token_ids or self.bad_words_token_ids)
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return tuple(self.stop or ())

    def for_answer(self, index: int) -> SamplingParams:
        """Return the settings of one of the ``n`` outputs: n=1, and the seed plus ``index``.

        The first one reports the prompt for all.
        """
        if self.n == 1:
            return self
        seed = self.seed
        if seed is not None:  # the sum wraps around in the range of seeds
            seed = (seed + index + MAX_SEED) % (2 * MAX_SEED + 1) - MAX_SEED
        reported = None if index else self.prompt_logprobs
        return self.replace(n=1, seed=seed, prompt_logprobs=reported)

    def replace(self, **changes: object) -> SamplingParams:
        """Return a copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def check_surrogates(text: str, what: str, param: str) -> None:
    """Raise RequestError if half of a surrogate pair is in a text: no bytes can encode it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} has half of a surrogate pair, U+{ord(text[error.start]):04X}, at character "
            f"{error.start}: send whole characters",
            param,
        ) from None


def _is_number(value: object) -> bool:
    """Whether a value is a number, not a bool or NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _is_list(value: object) -> bool:
    """Whether a value is a list of some kind, or None."""
    return value is None or (isinstance(value, Collection) and not isinstance(value, str))


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _is_word(value: object) -> bool:
    if value is None or not _is_list(value):
        return False
    return 0 < len(value) <= MAX_BAD_WORD_TOKENS and all(map(_is_token_id, value))  # type: ignore[arg-type, call-overload]


def shown(value: object) -> str:
    """Return a value as text of at most 80 characters."""
    if type(value) is int and value.bit_length() > _SHOWN_BITS:  # Python may refuse to print it
        return f"an integer of {value.bit_length()} bits"
    return reprlib.repr(value)[:80]
