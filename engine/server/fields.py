"""The building blocks of the request models: strict, closed, and bounded.

JSON types are taken literally ("1" is not a number, true is not 1), an unknown field is refused,
and null means the same as leaving a field out. A field that OpenAI has and Kiln does not act on is
declared as ``Unsupported``: it may be null, and nothing else.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
)
from pydantic_core import CoreSchema, core_schema

from kiln.engine.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

Unsupported = Annotated[None, "not supported yet"]


class StrictModel(BaseModel):
    """A part of a request body."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Only:
    """Accepts only values that change nothing; the error and the JSON schema say so."""

    def __init__(self, *neutral: Any) -> None:
        self._neutral = neutral

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Check the value after its type."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Describe the field by the values that it takes."""
        return {"enum": list(self._neutral), "description": "Not supported yet"}

    def _check(self, value: Any) -> Any:
        if value in self._neutral:
            return value
        allowed = " or ".join("null" if item is None else repr(item) for item in self._neutral)
        raise ValueError(f"is not supported yet: leave it out, or send {allowed}")


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

MAX_PROMPTS = 128  # in one request
_FAIL_FAST = Field(fail_fast=True)  # one error is enough: a body can hold a million wrong ones

# Whatever their meaning, integers of a body fit the messages to the engine.
Int = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], _FAIL_FAST]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,10}$")]  # as a key of an object
StopTexts = Annotated[list[str], _FAIL_FAST, Field(max_length=MAX_STOP_STRINGS)]
StopField = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[StopTexts, Tag("<list>")],
    Discriminator(_kind_of_text),
]
StopTokenIds = Annotated[TokenIds, Field(max_length=MAX_STOP_TOKEN_IDS)]
LogitBias = Annotated[dict[TokenId, float], Field(max_length=MAX_LOGIT_BIAS)]
_Texts = Annotated[list[str], _FAIL_FAST, Field(max_length=MAX_PROMPTS)]
_TokenLists = Annotated[list[TokenIds], _FAIL_FAST, Field(max_length=MAX_PROMPTS)]
PromptField = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[_Texts, Tag("<texts>")]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[_TokenLists, Tag("<token_lists>")],
    Discriminator(_kind_of_prompt),
]


def listed(entry: Any) -> Any:
    """Return the type of a list whose first wrong entry is the only one to be reported."""
    return Annotated[list[entry], _FAIL_FAST]


def text_or_parts(part: Any) -> Any:
    """Return the type of a message's content: a string, or a list of parts."""
    parts = Annotated[list[part], _FAIL_FAST, Tag("<list>")]
    return Annotated[Annotated[str, Tag("<text>")] | parts, Discriminator(_kind_of_text)]
