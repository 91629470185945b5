"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kiln.engine.requests.request import CompletionOutput, Logprob
from kiln.engine.server.responses import ChatLogprobs, CompletionLogprobs, TopLogprob
from kiln.engine.text.detokenizer import Detokenizer
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
                for token_id, position in zip(part.token_ids, part.logprobs or [], strict=True)
            ]
        }

    def completion(self, part: CompletionDelta | CompletionOutput) -> CompletionLogprobs:
        """Return positions in the completions format."""
        positions = zip(part.token_ids, part.logprobs or [], strict=True)
        return self._lists(part.text_offsets or (), positions)

    def echoed(
        self,
        token_ids: Sequence[int],
        prompt: Sequence[Mapping[int, Logprob] | None],
        then: CompletionLogprobs | None,
        text: str,
    ) -> CompletionLogprobs:
        """Return the positions of a prompt, whose text is ``text``, and those of its output."""
        offsets = [0] * len(token_ids)
        if self._tokenizer is not None:
            shown = Detokenizer(self._tokenizer, with_offsets=True)
            shown.push(token_ids)
            offsets = [min(one, len(text)) for one in shown.offsets]
        written = self._lists(offsets, zip(token_ids, prompt, strict=True))
        if then is not None:
            written["text_offset"] += [len(text) + one for one in then["text_offset"]]
            written["token_logprobs"] += then["token_logprobs"]
            written["tokens"] += then["tokens"]
            written["top_logprobs"] += then["top_logprobs"]
        return written

    def _lists(
        self, offsets: Sequence[int], positions: Iterable[tuple[int, Mapping[int, Logprob] | None]]
    ) -> CompletionLogprobs:
        logprobs, tokens, tops = list[float | None](), list[str](), list[dict[str, float] | None]()
        for token_id, position in positions:
            tokens.append(self._name(token_id))
            if position is None:  # nothing comes before the first token of a prompt
                logprobs.append(None)
                tops.append(None)
                continue
            logprobs.append(_finite(position[token_id].logprob))
            # OpenAI also lists the token itself, even if it is not among the most likely. If two
            # tokens have the same text, the token itself is kept, or else the more likely one.
            top: dict[str, float] = {}
            for token, entry in [(token_id, position[token_id]), *self._likely(position)]:
                top.setdefault(self._name(token), _finite(entry.logprob))
            tops.append(top)
        return {
            "text_offset": list(offsets),
            "token_logprobs": logprobs,
            "tokens": tokens,
            "top_logprobs": tops,
        }

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


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
