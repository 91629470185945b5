"""A tokenizer from a ``tekken.json``: the same ids as Mistral's own library, mistral-common."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from kiln.engine.errors import ModelError
from kiln.engine.models.tekken_file import BOS, TekkenFile
from kiln.engine.text.token_bytes import byte_characters


def tekken_backend(file: TekkenFile, path: Path) -> Backend:
    """Return a tokenizer of the file at ``path``. Raises ModelError for a pattern it cannot run."""
    characters = byte_characters()
    forms = ["".join(map(characters.__getitem__, piece)) for piece in file.pieces]
    places = {form: index for index, form in enumerate(forms)}
    ids = {text: index for index, text in enumerate(file.special_tokens)}
    ids |= {form: len(file.special_tokens) + index for form, index in places.items()}
    # A part of a text that is a piece is not split, even if no merges lead to it.
    backend = Backend(models.BPE(ids, _merges(forms, places), ignore_merges=True))
    try:
        split = pre_tokenizers.Split(Regex(file.pattern), "isolated")
    except Exception as error:  # the Rust library raises Exception itself
        raise ModelError(f"{path}: its pattern is no regular expression: {error}") from error
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes])
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(text, normalized=False) for text in file.special_tokens]
    backend.add_special_tokens(special)
    backend.post_processor = processors.TemplateProcessing(
        f"{BOS} $A", f"{BOS} $A {BOS}:1 $B:1", [(BOS, ids[BOS])]
    )
    return backend


def _merges(forms: list[str], places: dict[str, int]) -> list[tuple[str, str]]:
    """Return the pairs that make a piece, in the order in which pairs are merged."""
    merges = []
    for form in forms:
        cuts = (
            (form[:at], form[at:])
            for at in range(1, len(form))
            if form[:at] in places and form[at:] in places
        )
        merges += sorted(cuts, key=lambda pair: (places[pair[0]], places[pair[1]]))
    return merges
