"""The field types of the request models: strict, closed, and bounded.

Types are not coerced: "1" is not a number, true is not 1. An unknown field is rejected, and null
means the same as an absent field. A field of OpenAI's that Kiln does not support is declared as
``Unsupported``: it may only be null.
"""

from __future__ import annotations

from collections.abc import Sequence
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

from kiln.engine.requests.neutral_settings import is_neutral
from kiln.engine.requests.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from kiln.engine.requests.waiting import MAX_PRIORITY

Unsupported = Annotated[None, "not supported yet"]


class StrictModel(BaseModel):
    """A part of a request body."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


_NAMES = {"None": "null", "True": "true", "False": "false"}  # JSON's


class Only:
    """Accepts only values without effect; the error and the JSON schema list them."""

    def __init__(self, *neutral: Any) -> None:
        self._neutral = neutral

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Validate the type, then the value."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Describe the field by its accepted values."""
        return {"enum": list(self._neutral)}

    def _check(self, value: Any) -> Any:
        if is_neutral(value, self._neutral):
            return value
        allowed = " or ".join(_NAMES.get(repr(item), repr(item)) for item in self._neutral)
        raise ValueError(f"is not supported yet: leave it out, or send {allowed}")


DirectCaller = Annotated[dict[str, Any] | None, Only(None, {"type": "direct"})]


def text_or(lists: Any) -> Any:
    """Return the type of a text or a list, told apart so that errors refer to the form sent."""
    forms: Any = Annotated[str, Tag("<text>")] | Annotated[lists, Tag("<list>")]
    return Annotated[
        forms, Discriminator(lambda value: "<list>" if isinstance(value, list) else "<text>")
    ]


def _kind_of_prompt(value: Any) -> str:
    """Return the form of a prompt by its first element, so that errors refer to that form."""
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else ""
    if isinstance(first, list):
        return "<token_lists>"
    return "<tokens>" if isinstance(first, int) and not isinstance(first, bool) else "<texts>"


# The union tags that appear in the paths of errors.
FORMS = frozenset(("<text>", "<list>", "<texts>", "<tokens>", "<token_lists>"))

MAX_PROMPTS = 128  # in one request
_FAIL_FAST = Field(fail_fast=True)  # report one error: a body can contain a million

# Every integer of a body must fit the messages to the engine.
Int = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
CacheSalt = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], _FAIL_FAST]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,10}$")]  # as an object key
StopTexts = Annotated[list[str], _FAIL_FAST, Field(max_length=MAX_STOP_STRINGS)]
StopField: Any = text_or(StopTexts)
StopTokenIds = Annotated[TokenIds, Field(max_length=MAX_STOP_TOKEN_IDS)]
BadWords = Annotated[list[str], _FAIL_FAST, Field(max_length=MAX_BAD_WORDS)]
LogitBias = Annotated[dict[TokenId, float], Field(max_length=MAX_LOGIT_BIAS)]


def prompt_field(most: int) -> Any:
    """Return the type of a text, token ids, or a list of at most so many of either."""
    texts: Any = Annotated[list[str], _FAIL_FAST, Field(max_length=most)]
    token_lists: Any = Annotated[list[TokenIds], _FAIL_FAST, Field(max_length=most)]
    forms: Any = (
        Annotated[str, Tag("<text>")]
        | Annotated[texts, Tag("<texts>")]
        | Annotated[TokenIds, Tag("<tokens>")]
        | Annotated[token_lists, Tag("<token_lists>")]
    )
    return Annotated[forms, Discriminator(_kind_of_prompt)]


PromptField: Any = prompt_field(MAX_PROMPTS)


def listed(entry: Any) -> Any:
    """Return the type of a list that reports only its first invalid entry."""
    return Annotated[list[entry], _FAIL_FAST]


def dumped(models: Sequence[StrictModel] | None) -> list[dict[str, Any]]:
    """Return models as they were sent."""
    return [model.model_dump(exclude_unset=True) for model in models or ()]


def without_nulls(**fields: Any) -> dict[str, Any]:
    """Return the fields that have a value: null means the same as an absent field."""
    return {name: value for name, value in fields.items() if value is not None}
