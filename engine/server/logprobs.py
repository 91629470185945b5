"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kiln.engine.requests.request import CompletionOutput, Logprob
from kiln.engine.server.responses import ChatLogprobs, CompletionLogprobs, TopLogprob
from kiln.engine.text.outputs import CompletionDelta
from kiln.engine.text.tokenizer import Tokenizer

_LOWEST = -9999.0  # OpenAI's value for probability 0: JSON has no infinity


class LogprobWriter:
    """Formats log-probabilities: at each position ``count`` likely tokens and the sampled one."""

    def __init__(self, tokenizer: Tokenizer | None, count: int) -> None:
        self._tokenizer = tokenizer
        self._count = count

    def chat(self, part: CompletionDelta | CompletionOutput) -> ChatLogprobs:
        """Return positions in the chat format."""
        return {
            "content": [
                {
                    **self._entry(token_id, position[token_id]),
                    "top_logprobs": [self._entry(*item) for item in self._likely(position)],
                }
                for token_id, position in _positions(part)
            ]
        }

    def completion(self, part: CompletionDelta | CompletionOutput) -> CompletionLogprobs:
        """Return positions in the completions format."""
        written: CompletionLogprobs = {
            "text_offset": list(part.text_offsets or ()),
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token_id, position in _positions(part):
            written["tokens"].append(self._name(token_id))
            written["token_logprobs"].append(_finite(position[token_id].logprob))
            # OpenAI also lists the sampled token, even if it is not among the most likely. Of two
            # tokens with the same text, it comes first, and else the more likely one.
            top: dict[str, float] = {}
            for token, entry in [(token_id, position[token_id]), *self._likely(position)]:
                top.setdefault(self._name(token), _finite(entry.logprob))
            written["top_logprobs"].append(top)
        return written

    def _likely(self, position: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
        """Return the ``count`` most likely tokens of a position, most likely first."""
        ranked = [
            (entry.rank, token_id, entry)
            for token_id, entry in position.items()
            if entry.rank is not None and entry.rank <= self._count
        ]
        return [(token_id, entry) for _, token_id, entry in sorted(ranked, key=lambda r: r[:2])]

    def _entry(self, token_id: int, entry: Logprob) -> TopLogprob:
        known = None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return {
            "token": self._name(token_id),
            "logprob": _finite(entry.logprob),
            "bytes": None if known is None else list(known),
        }

    def _name(self, token_id: int) -> str:
        r"""Return a token as text; part of a character as in OpenAI's API, ``bytes:\xe2\x82``."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        known = self._tokenizer.token_bytes(token_id)
        if known is None:
            return self._tokenizer.token_text(token_id)
        try:
            return known.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known)


def _positions(
    part: CompletionDelta | CompletionOutput,
) -> Sequence[tuple[int, Mapping[int, Logprob]]]:
    return list(zip(part.token_ids, part.logprobs or [], strict=True))


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
