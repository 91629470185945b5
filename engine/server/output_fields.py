"""The fields that say what an output must look like, under the names that servers have for them.

Each becomes ``SamplingParams.structured_outputs``; only one of them may ask for something.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from kiln.engine.requests.structured_outputs import FIELD, StructuredOutputsParams
from kiln.engine.server.errors import ApiError
from kiln.engine.server.fields import StrictModel, Unsupported
from kiln.engine.server.unions import one_of


def _is_schema(value: Any) -> Any:
    if value is None or isinstance(value, str | dict | bool):
        return value
    raise ValueError(f"must be a JSON Schema, an object or its text, got {repr(value)[:80]}")


Schema = Annotated[
    Any,
    AfterValidator(_is_schema),
    WithJsonSchema({"type": ["object", "string", "boolean", "null"]}),
]


class TextFormat(StrictModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(StrictModel):
    """A JSON Schema. The output follows it with ``strict`` or without."""

    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


_FORMATS = {"text": TextFormat, "json_object": JsonObjectFormat, "json_schema": JsonSchemaFormat}


class StructuredOutputs(StrictModel):
    """One of ``json``, ``regex``, ``choice``, ``grammar`` and ``json_object``, as vLLM has it."""

    json_: Schema = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: Unsupported = None


# Older names, vLLM's and SGLang's -> what they are called in ``structured_outputs``.
OLDER_NAMES = {
    **{f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")},
    **{"json_schema": "json", "regex": "regex", "ebnf": "grammar"},
}
_SCHEMA_OF_FORMAT = "response_format.json_schema.schema"


class OutputFields(StrictModel):
    """The fields of an output's form, in chat and completions."""

    response_format: one_of(_FORMATS) | None = None  # type: ignore[valid-type]
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: Schema = None
    regex: str | None = None
    ebnf: str | None = None

    @model_validator(mode="after")
    def _one_form(self) -> OutputFields:
        if len(self._forms) > 1:
            first, second = self._forms[:2]
            message = f"{second}: cannot be sent together with {first}: send one of them"
            raise ApiError(400, message, second)
        return self

    @property
    def output_form(self) -> StructuredOutputsParams | None:
        """What the output must look like. Raises RequestError with SamplingParams' names."""
        for name in self._forms:
            value = getattr(self, name)
            if name in OLDER_NAMES:
                return StructuredOutputsParams.of({OLDER_NAMES[name]: value})
            if name == FIELD:
                return StructuredOutputsParams.of(value.model_dump(by_alias=True))
            if isinstance(value, JsonSchemaFormat):
                return StructuredOutputsParams(json=value.json_schema.schema_)
            return StructuredOutputsParams(json_object=True)
        return None

    @property
    def form_names(self) -> dict[str, str]:
        """SamplingParams' names of the form -> what they are called in this body."""
        for name in self._forms:
            if name in OLDER_NAMES:
                return {FIELD: name, f"{FIELD}.{OLDER_NAMES[name]}": name}
            if name != FIELD:
                return {FIELD: name, f"{FIELD}.json": _SCHEMA_OF_FORMAT}
        return {}

    @property
    def _forms(self) -> list[str]:
        """The names of the fields that ask for a form."""
        names = ("response_format", FIELD, *OLDER_NAMES)
        asked = [name for name in names if getattr(self, name) is not None]
        return [name for name in asked if not isinstance(getattr(self, name), TextFormat)]
