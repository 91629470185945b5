"""The OpenAPI document: FastAPI's, plus the request bodies, which the routes parse themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kiln.engine.server import answer_fields, part_fields
from kiln.engine.server.examples import EXAMPLES
from kiln.engine.server.field_table import TABLES, FieldRow
from kiln.engine.server.responses import ErrorEnvelope
from kiln.engine.server.route_fields import ROUTE_TABLES

_NO_ERRORS: Mapping[int, str] = MappingProxyType({})
_REF = "#/components/schemas/{model}"
_ERRORS: Mapping[int, str] = MappingProxyType(
    {
        400: "A field is wrong, unknown or out of range",
        404: "The model is not served here",
        408: "The body took too long to arrive",
        413: "The body is too large",
        415: "The body is not declared as JSON",
        500: "This request failed in the engine",
        503: "The engine is loading, full, or stopped",
    }
)


def describe_body(
    body: type[BaseModel],
    answer: Any,
    errors: Mapping[int, str] = _NO_ERRORS,
    envelope: Any = ErrorEnvelope,
) -> dict[str, Any]:
    """Return the keyword arguments that document a route's body and responses.

    ``errors`` describes statuses that only this route has, ``envelope`` the form of errors.
    """
    reference = {"$ref": _REF.format(model=body.__name__)}
    content = {"application/json": {"schema": reference, "example": EXAMPLES[body.__name__]}}
    texts = {**_ERRORS, **errors}
    told = {code: {"model": envelope, "description": text} for code, text in texts.items()}
    answers = {200: {"model": answer, "description": "The response; with stream, its events"}}
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
        "responses": {**told, **answers},
    }


def describe_answer(answer: Any, parameters: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the keyword arguments that document what a GET route answers, and its parameters."""
    told: dict[int, Any] = {200: {"model": answer, "description": "The response"}}
    if not parameters:
        return {"responses": told}
    told[400] = {"model": ErrorEnvelope, "description": "A parameter is wrong"}
    return {"responses": told, "openapi_extra": {"parameters": list(parameters)}}


def install(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Make the app document the bodies ``models``; the document is built on first use."""
    build = app.openapi
    tables = TABLES | ROUTE_TABLES

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = build()
            _, bodies = models_json_schema(
                [(body, "validation") for body in models], ref_template=_REF
            )
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            _describe_parameters(schema)
            for name, shape in schemas.items():
                _describe_parts(shape, answer_fields.ANSWERS.get(name), answer_fields.ANYWHERE)
            for name, shape in bodies["$defs"].items():
                assert name not in schemas, f"{name} is the name of a body and of an answer"
                if name in tables:
                    _describe_fields(shape, tables[name])
                else:
                    _describe_parts(shape, part_fields.PARTS.get(name), part_fields.ANYWHERE)
            schemas.update(bodies["$defs"])
        return build()

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's documented way


def _describe_parameters(schema: dict[str, Any]) -> None:
    """Say what parameters mean, and leave out status 422: a text in a path is never invalid."""
    for operation in (one for path in schema["paths"].values() for one in path.values()):
        operation["responses"].pop("422", None)
        for one in operation.get("parameters", ()):
            if "description" not in one:
                one["description"] = part_fields.PARAMETERS[one["name"]]
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)


def _describe_parts(
    shape: dict[str, Any], own: Mapping[str, str] | None, anywhere: Mapping[str, str]
) -> None:
    """Say in the schema of an object in a body or an answer what each field means."""
    for name, field in shape.get("properties", {}).items():
        says = (own or {}).get(name) or anywhere.get(name)
        if says is not None:
            field["description"] = says


def _describe_fields(body: dict[str, Any], rows: Sequence[FieldRow]) -> None:
    """Say in a body's schema what each field does; acting fields come first."""
    shapes = body["properties"]
    for row in sorted(rows, key=lambda row: ("acting", "neutral", "refused").index(row.kind)):
        shape = {**shapes.pop(row.name), "description": row.says, "x-kiln": row.kind}
        if row.values:
            shape["enum"] = list(row.values)
        shapes[row.name] = shape
