"""The building blocks of the request models: strict, closed, and bounded.

JSON types are taken literally ("1" is not a number, true is not 1), an unknown field is refused,
and null means the same as leaving a field out. A field that OpenAI has and Kiln does not act on is
declared as ``Unsupported``: it may be null, and nothing else.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

Unsupported = Annotated[None, "not supported yet"]


class StrictModel(BaseModel):
    """A part of a request body."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def only(*neutral: Any) -> AfterValidator:
    """Accept only values that change nothing, and say so."""

    def check(value: Any) -> Any:
        if value in neutral:
            return value
        allowed = " or ".join("null" if item is None else repr(item) for item in neutral)
        raise ValueError(f"is not supported yet: leave it out, or send {allowed}")

    return AfterValidator(check)


def _kind_of_text(value: Any) -> str:
    return "<list>" if isinstance(value, list) else "<text>"


def _kind_of_prompt(value: Any) -> str:
    """Name the form of a prompt by its first element, so that errors speak of that form."""
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else ""
    if isinstance(first, list):
        return "<token_lists>"
    return "<tokens>" if isinstance(first, int) and not isinstance(first, bool) else "<texts>"


# The forms of a field, as they appear in the place of an error.
FORMS = frozenset(("<text>", "<list>", "<texts>", "<tokens>", "<token_lists>"))

_FAIL_FAST = Field(fail_fast=True)  # one error is enough: a body can hold a million wrong ones

# Whatever their meaning, integers of a body fit the messages to the engine.
Int = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], _FAIL_FAST]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,10}$")]  # as a key of an object
Texts = Annotated[list[str], _FAIL_FAST]
TokenLists = Annotated[list[TokenIds], _FAIL_FAST]
OneOrMoreTexts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Texts, Tag("<list>")], Discriminator(_kind_of_text)
]
PromptField = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Texts, Tag("<texts>")]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[TokenLists, Tag("<token_lists>")],
    Discriminator(_kind_of_prompt),
]


def text_or_parts(part: Any) -> Any:
    """Return the type of a message's content: a string, or a list of parts."""
    parts = Annotated[list[part], _FAIL_FAST, Tag("<list>")]
    return Annotated[Annotated[str, Tag("<text>")] | parts, Discriminator(_kind_of_text)]
