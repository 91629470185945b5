"""Objects of several kinds in a body, told apart by one of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Union

from pydantic import BaseModel, Discriminator, GetCoreSchemaHandler, Tag
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import CoreSchema, core_schema

from kiln.engine.server.fields import listed, text_or

TAG_PREFIX = "<kind "  # of the tags of these unions, which the paths of errors leave out


def one_of(
    kinds: Mapping[str, type[BaseModel]], key: str = "type", default: str | None = None
) -> Any:
    """Return the type of an object that is one of ``kinds``, by the value of its field ``key``.

    ``default`` is the kind of an object without that field. Any other value is an error that names
    the field and lists the kinds; the other fields of that object are not looked at.
    """

    def tag(value: Any) -> str:
        kind = getattr(value, key, None)
        if isinstance(value, Mapping):
            kind = default if value.get(key) is None else value[key]
        return _tag(kind if isinstance(kind, str) and kind in kinds else "")

    members: list[Any] = [Annotated[kind, Tag(_tag(name))] for name, kind in kinds.items()]
    hidden: Any = SkipJsonSchema  # of OpenAPI
    members.append(Annotated[hidden[Annotated[Any, _Unknown(key, tuple(kinds))]], Tag(_tag(""))])
    return Annotated[Union[tuple(members)], Discriminator(tag)]  # noqa: UP007 (built from a list)


class _Unknown:
    """Accepts nothing: its error names the field that should tell the kind, and the kinds."""

    def __init__(self, key: str, names: tuple[str, ...]) -> None:
        self._key = key
        self._names = names

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Look at the one field alone."""
        field = core_schema.typed_dict_field(core_schema.literal_schema(list(self._names)))
        return core_schema.typed_dict_schema({self._key: field}, extra_behavior="ignore")


def text_or_parts(part: Any) -> Any:
    """Return the type of a content: a string, or a list of parts."""
    return text_or(listed(part))


def _tag(name: str) -> str:
    return f"{TAG_PREFIX}{name}>"
