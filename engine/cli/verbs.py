"""What to say to a verb that ``kiln`` does not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

# Other engines' verbs, with the command in which they are used -> what Kiln has instead.
_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "kiln complete": "POST /v1/completions of kiln serve completes a text, and so does "
        "LLM.generate in Python",
        "kiln run-batch": "LLM.chat and LLM.generate in Python answer many requests at once",
        "kiln collect-env": "kiln doctor and kiln env describe this machine, both also with --json",
        "kiln launch": "kiln serve starts the server and its engine",
        "kiln run": "kiln chat MODEL talks to a model, kiln serve MODEL serves it",
        "kiln pull": "kiln serve and kiln chat download a model that is named by its hub id",
        "kiln bench serve": "write kiln bench serving",
        "kiln bench throughput": "write kiln bench offline",
        "kiln bench startup": "kiln serve and kiln bench latency say how long loading takes",
        "kiln bench sweep": "kiln bench latency and prefill measure lists of sizes in one run",
    }
)


def explain_verb(program: str, word: str, verbs: Iterable[str], inner: Iterable[str]) -> str:
    """Return why a word is no verb of a program, and what to write.

    ``verbs``: those that it has; ``inner``: the verbs of its verbs, such as "kernels list".
    """
    known, shown = list(verbs), word[:80]
    if instead := _OTHERS.get(f"{program} {word.lower()}"):
        return f"there is no {program} {shown}: {instead}"
    if near := get_close_matches(word.lower(), known, 1):
        return f"there is no {program} {shown}; did you mean {program} {near[0]}?"
    by_last = {one.split()[-1]: one for one in inner}
    if near := get_close_matches(word.lower(), by_last, 1, 0.8):
        return f"there is no {program} {shown}; did you mean {program} {by_last[near[0]]}?"
    if "/" in word or Path(word[:255]).is_dir():
        return f"{shown!r} is no command; write what to do with it, such as {program} serve {shown}"
    return f"there is no {program} {shown}; there are {', '.join(known)}"
