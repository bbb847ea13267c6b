"""`GET /v1/openapi.json`: the routes as OpenAPI 3.1, generated from the route table and its types."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec

from farhand import __version__
from farhand.api.server.http import Reply, Request
from farhand.api.server.router import BYTES, FORM, JSON, Query, Route
from farhand.gateway.calls.gate import MAX_IDEMPOTENCY_KEY

DESCRIPTION = (
    "Tools on every machine of yours, called by name. Errors are `{error: {code, message, details?}}`; "
    "every answer has an `X-Request-Id`."
)
IDEMPOTENCY_KEY = Query(
    "Idempotency-Key",
    f"1 to {MAX_IDEMPOTENCY_KEY} characters; a request that is repeated with it gets the outcome of the first one.",
)
_PARAMETER = re.compile(r"\{([^}]+?)(\.\.\.)?\}")
_REFERENCE = "#/components/schemas/{name}"


class ErrorBody(msgspec.Struct):
    code: str
    message: str
    details: Any | msgspec.UnsetType = msgspec.UNSET


class ErrorAnswer(msgspec.Struct):
    error: ErrorBody


def openapi_routes(routes: Iterable[Route]) -> list[Route]:
    """Return the route that describes `routes` and itself."""
    described: list[Route] = []

    @functools.cache
    def encoded() -> bytes:
        return msgspec.json.encode(document(described))

    async def openapi(_request: Request) -> Reply:
        return Reply(encoded())

    own = Route(method="GET", path="/v1/openapi.json", scope=None, summary="This description.", handler=openapi)
    described += [*routes, own]
    return [own]


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """Build the document. Raises ValueError for a route without a summary, or types of the same name."""
    table = list(routes)
    if silent := [f"{route.method} {route.path}" for route in table if not route.summary]:
        raise ValueError(f"routes without a summary: {', '.join(silent)}")
    schemas = _Schemas(table)
    paths: dict[str, dict[str, Any]] = {}
    for route in table:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Farhand", "version": __version__, "description": DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
        "security": [{"bearer": []}, {"key": []}],
    }


class _Schemas:
    """The schema of each type in a route."""

    def __init__(self, routes: Iterable[Route]) -> None:
        types: list[Any] = [ErrorAnswer]
        for route in routes:
            named = (route.body, route.answer, *(query.type for query in route.query))
            types += [one for one in named if one is not None and one not in types]
        schemas, self.components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
        if twice := [name for name in self.components if "." in name]:
            raise ValueError(f"types of the same name: {', '.join(twice)}; rename one of them")
        _add_items([schemas, self.components])
        self._known = list(zip(types, schemas, strict=True))

    def of(self, wanted: Any) -> dict[str, Any]:
        if wanted is None:
            return {}
        return next(schema for known, schema in self._known if known == wanted)


def _operation(route: Route, schemas: _Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").rstrip("_"),
        "summary": route.summary,
        "tags": [_tag(route.path)],
        "responses": _responses(route, schemas),
    }
    if route.scopes:
        operation["description"] = "Needs the scope " + " or ".join(f"`{scope.value}`" for scope in route.scopes) + "."
    else:
        operation["security"] = []
    if parameters := _parameters(route, schemas):
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas.of(route.body)}}}
    elif route.takes is not None:
        takes = BYTES if route.takes == "*/*" else route.takes  # client generators do not support the wildcard
        operation["requestBody"] = {"content": {takes: {"schema": _schema_of_media(takes)}}}
    return operation


def _parameters(route: Route, schemas: _Schemas) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {
            "name": found[1],
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 0 if found[2] else 1},
        }
        for found in _PARAMETER.finditer(route.path)
    ]
    headers = (IDEMPOTENCY_KEY,) if route.idempotent or route.repeatable else ()
    for place, queries in (("query", route.query), ("header", headers)):
        parameters += [
            {
                "name": query.name,
                "in": place,
                "required": query.required,
                "description": query.description,
                "schema": schemas.of(query.type),
            }
            for query in queries
        ]
    return parameters


def _responses(route: Route, schemas: _Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {media: {"schema": _schema_of_media(media)} for media in route.media}
    if JSON in content:
        content[JSON] = {"schema": schemas.of(route.answer) or {"type": "object"}}
    responses: dict[str, Any] = {str(route.status): {"description": HTTPStatus(route.status).phrase}}
    if route.media:
        responses[str(route.status)]["content"] = content
    for status, description in route.also.items():
        other = {media: {"schema": _schema_of_media(media)} for media in (JSON, "text/html", BYTES)}
        responses[str(status)] = {"description": description, "content": other}
    # For any route: a wrong host or origin, an invalid head, too many failed attempts.
    usual = {400, 403, 429}
    if route.scopes:
        usual.add(401)
    if "{" in route.path:
        usual.add(404)
    if route.body is not None or route.takes is not None or route.method == "POST":
        usual |= {413, 415}
    if route.acts:
        usual.add(423)
    if route.repeatable:
        usual |= {409, 503}
    error = {"schema": schemas.of(ErrorAnswer)}
    for status in sorted(usual | set(route.errors)):
        if str(status) not in responses:
            responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": {JSON: error}}
    return responses


def _schema_of_media(media: str) -> dict[str, Any]:
    """Return the schema of a body without a type."""
    if media == JSON:
        return {}
    if media.endswith("+json"):
        return {"type": "object"}
    if media == FORM:
        return {"type": "object", "additionalProperties": {"type": "string"}}
    text = media.startswith("text/") or media == "image/svg+xml"
    return {"type": "string"} if text else {"type": "string", "format": "binary"}


def _add_items(schema: Any) -> None:
    """Add `items` to arrays: client generators need it; msgspec omits it where any item is allowed."""
    if isinstance(schema, list):
        for one in schema:
            _add_items(one)
    elif isinstance(schema, dict):
        if schema.get("type") == "array" and "prefixItems" not in schema:
            schema.setdefault("items", {})
        for one in schema.values():
            _add_items(one)


def _tag(path: str) -> str:
    """Return the OpenAPI tag of a path: its first fixed segment after `v1`."""
    words = [word for word in path.split("/") if word and not word.startswith("{")]
    if words[:1] == ["v1"] and len(words) > 1:
        return words[1].removesuffix(".json")
    return words[0] if (words and len(words) > 1) or words[:1] == ["chats"] else "gateway"
