"""Texts that a grammar allows, drawn token by token from its masks, as a random model would."""

from __future__ import annotations

import numpy as np

from kiln.engine.grammar.vocabulary import check, compiled, read_vocabulary
from kiln.engine.text.tokenizer import Tokenizer

_LONGEST = 700  # tokens
_CLOSING = tuple('"}])<,')


class Walker:
    """Draws texts with the tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        size = tokenizer.vocab_size
        self._ends = sorted(tokenizer.eos_token_ids)
        self._vocabulary = read_vocabulary(tokenizer.backend.to_str(), size, self._ends)
        texts = [tokenizer.token_text(token) for token in range(size)]
        self._closing = np.array([text.startswith(_CLOSING) for text in texts])
        self._blank = np.array([not text.strip() for text in texts])

    def walk(self, grammar, rng, begun=""):
        """Return a text that the grammar allows; None if it did not end soon enough.

        ``begun`` is how it begins. Raises RequestError for a grammar that cannot be compiled.
        """
        matcher = compiled(self._vocabulary, grammar.text)
        taken = self.tokenizer.encode(begun, add_special_tokens=False)
        assert matcher.consume_tokens(taken), f"{begun!r}: {matcher.get_error()}"
        for step in range(_LONGEST):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            check(matcher)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            may_end = matcher.is_accepting()
            if may_end:
                allowed = allowed[~np.isin(allowed, self._ends)]
            if may_end and (not len(allowed) or rng.random() < 0.3 + step / 50):
                return self.tokenizer.decode(taken, skip_special_tokens=False)
            assert len(allowed), "neither a token nor the end may follow"
            taken.append(self._draw(allowed, rng))
            assert matcher.consume_token(taken[-1]), matcher.get_error()
        return None

    def _draw(self, allowed, rng):
        """Draw a token, seldom white space, and often one that may close something."""
        solid = allowed[~self._blank[allowed]]
        if len(solid) and rng.random() < 0.9:
            allowed = solid
        closing = allowed[self._closing[allowed]]
        if len(closing) and rng.random() < 0.3:
            allowed = closing
        return int(rng.choice(allowed))
