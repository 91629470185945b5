"""Incremental detokenization: emits complete characters, and no part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import islice

from kiln.engine.text.stop_strings import StopMatcher
from kiln.engine.text.tokenizer import Tokenizer

CONTEXT_TOKENS = 6  # enough for any decoder that depends on neighbouring tokens
MAX_PENDING_TOKENS = 16  # an incomplete character is at most 3 bytes long, so at most 3 tokens
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class ByteStream:
    """Decodes tokens whose bytes are known, one complete character at a time.

    It is exact, at constant cost per token. ``position`` is the number of characters so far,
    without an incomplete one.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._begun = b""  # an incomplete character
        self._first = not context
        self.position = 0

    def place(self, token_id: int) -> int:
        """Return the position of the character in which the next token begins.

        A character that is split over several tokens has one position, which all of them share.
        """
        begun = self._begun
        piece = self._tokenizer.token_bytes(token_id, self._first)
        if not begun or not piece or _continues(begun, piece):
            return self.position
        return self.position + len(begun.decode(errors="replace"))

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that the tokens complete, or ""."""
        bytes_of, pieces = self._tokenizer.token_bytes, [self._begun]
        for token_id in token_ids:
            pieces.append(bytes_of(token_id, self._first) or b"")
            if self._first:
                self._first = not bytes_of(token_id)
        data = b"".join(pieces)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._begun = data[used:]
        self.position += len(text)
        return text

    def finish(self) -> str:
        """Return the text of an incomplete character at the end."""
        begun, self._begun = self._begun, b""
        return begun.decode(errors="replace")


def _continues(begun: bytes, piece: bytes) -> bool:
    """Whether a token continues a character whose first bytes are known."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(begun + piece[:1])
    except UnicodeDecodeError:
        return False
    return True


class WindowStream:
    """Decodes with any tokenizer, over the last few tokens and the incomplete ones.

    Its methods are those of ByteStream.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = list(context)
        self._pending: list[int] = []
        self.position = 0

    def place(self, token_id: int) -> int:
        """Return the position of the character in which the next token begins."""
        return self.position

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that the tokens complete, or ""."""
        return "".join(map(self._push_one, token_ids))

    def _push_one(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._pending_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < MAX_PENDING_TOKENS:
            return ""
        return self._take(text)

    def finish(self) -> str:
        """Return the text of an incomplete character at the end."""
        return self._take(self._pending_text())

    def _take(self, text: str) -> str:
        # The context must start at a character boundary; else it decodes to garbage.
        context = self._pending if text else [*self._context, *self._pending]
        self._context, self._pending = context[-MAX_PENDING_TOKENS:], []
        self.position += len(text)
        return text

    def _pending_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        text = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)
        if text.startswith(before):
            return text[len(before) :]
        return self._tokenizer.decode(self._pending, skip_special_tokens=False)


class Detokenizer:
    """Detokenizes one stream of tokens.

    ``context`` is the end of the prompt; with it the first word keeps its leading space.
    ``skip_special_tokens`` removes special tokens from the text, except those in ``shown``. A stop
    string counts only if it ends after ``min_tokens`` tokens. With ``with_offsets``, ``offsets``
    gets the position in the text at which each token begins; it is that of the next character for
    a token without text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        context: Sequence[int] = (),
        with_offsets: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._skipped = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        kept = (token for token in reversed(context) if token not in self._skipped)
        before = list(islice(kept, CONTEXT_TOKENS))[::-1]
        by_bytes = tokenizer.token_bytes(0) is not None
        self._stream = (ByteStream if by_bytes else WindowStream)(tokenizer, before)
        self._stops = StopMatcher(stop, include_stop)
        self._min_tokens = min_tokens
        self.num_tokens = 0  # consumed, without those after a stop string
        self._with_offsets = with_offsets
        self._is_plain = not stop and not with_offsets  # tokens then need not be told apart
        self.offsets: list[int] = []

    @property
    def position(self) -> int:
        """The number of characters of all tokens so far."""
        return self._stream.position

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stops.stopped_by

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that can be emitted now."""
        if self._is_plain:
            self.num_tokens += len(token_ids)
            if self._skipped.isdisjoint(token_ids):
                return self._stream.push(token_ids)
            return self._stream.push([one for one in token_ids if one not in self._skipped])
        shown = []
        for token_id in token_ids:
            if self.stopped_by is not None:
                break
            self.num_tokens += 1
            shows = token_id not in self._skipped
            if self._with_offsets:
                stream = self._stream
                self.offsets.append(stream.place(token_id) if shows else stream.position)
            if shows:
                armed = self.num_tokens > self._min_tokens
                shown.append(self._stops.feed(self._stream.push((token_id,)), armed))
        return "".join(shown)

    def finish(self) -> str:
        """Return the text held back, because no more tokens follow."""
        if self.stopped_by is not None:
            return ""
        armed = self.num_tokens > self._min_tokens
        last = self._stops.feed(self._stream.finish(), armed)
        return last if self.stopped_by is not None else last + self._stops.finish()
