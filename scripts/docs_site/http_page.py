"""The page of all HTTP routes, from the OpenAPI description that a gateway serves."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEPTH = 6


def description(site: Path) -> dict[str, Any]:
    """Start a gateway in a temporary home, and return its description; also written into the site."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("FARHAND_", "SA_NODE"))}
    with tempfile.TemporaryDirectory() as home:
        gateway = subprocess.Popen(
            [sys.executable, "-m", "farhand", "gateway", "--home", f"{home}/home", "--port", "0"],
            env={**clean, "HOME": home},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert gateway.stdout is not None
            ready = gateway.stdout.readline()
            found = re.search(r"http://\S+", ready)
            if found is None:
                gateway.terminate()
                raise RuntimeError(f"the gateway did not start: {ready}{gateway.communicate()[1]}")
            with urllib.request.urlopen(f"{found[0]}/v1/openapi.json") as answer:  # noqa: S310
                document: dict[str, Any] = json.load(answer)
        finally:
            gateway.terminate()
            gateway.communicate()
    (site / "assets").mkdir(parents=True, exist_ok=True)
    (site / "assets" / "openapi.json").write_text(json.dumps(document))
    return document


def markdown(document: dict[str, Any]) -> str:
    groups: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            part = groups.setdefault(about["tags"][0], [])
            part += operation(method.upper(), path, about, document["components"]["schemas"])
    return "\n".join(line for tag in sorted(groups) for line in (f"## {tag}", "", *groups[tag]))


def operation(method: str, path: str, about: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    yield f"### {method} {path.replace('{', '&#123;').replace('}', '&#125;')}"
    yield ""
    yield about["summary"]
    yield ""
    if about.get("description"):
        yield about["description"]
        yield ""
    parameters = about.get("parameters", [])
    if parameters:
        yield "| parameter | in | type | |"
        yield "|---|---|---|---|"
        for one in parameters:
            kind = json.dumps(example(one.get("schema"), schemas)).strip('"')
            name = f"`{one['name']}`" + ("" if one.get("required") else "?")
            text = (one.get("description") or "").replace("|", "\\|").replace("\n", " ")
            yield f"| {name} | {one['in']} | `{kind}` | {text} |".replace(f"`{kind}`", f"`{kind}`".replace("|", "\\|"))
        yield ""
    body: dict[str, Any] = about.get("requestBody", {}).get("content", {})
    yield from shapes("Body", body, schemas)
    for status, answer in about["responses"].items():
        if int(status) < 400:
            yield from shapes(f"{status} {answer['description']}", answer.get("content", {}), schemas)
    errors = [
        f"{status} {answer['description']}" for status, answer in about["responses"].items() if int(status) >= 400
    ]
    if errors:
        yield f"Errors: {', '.join(errors)}"
        yield ""
    sample = ""
    if "application/json" in body:
        required = only_required(body["application/json"].get("schema"), schemas)
        sample = json.dumps(required, indent=2) if isinstance(required, dict) else "{}"
    data = {
        "method": method,
        "path": path,
        "parameters": [
            {"name": one["name"], "in": one["in"], "required": bool(one.get("required"))} for one in parameters
        ],
        "body": sample,
        "media": next(iter(body), ""),
    }
    yield f'<div class="try-it" data-operation="{html.escape(json.dumps(data))}"></div>'
    yield ""


def shapes(title: str, content: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    for media, about in content.items():
        yield f"{title} (`{media}`)"
        yield ""
        if about.get("schema"):
            yield "```json"
            yield json.dumps(example(about["schema"], schemas), indent=2, ensure_ascii=False)
            yield "```"
            yield ""


def example(schema: dict[str, Any] | None, schemas: dict[str, Any], depth: int = 0) -> Any:
    """Return an example value of a schema, with type names in place of values."""
    if not schema or depth > DEPTH:
        return "…"
    if "$ref" in schema:
        return example(schemas[schema["$ref"].rpartition("/")[2]], schemas, depth + 1)
    choice = schema.get("anyOf") or schema.get("oneOf")
    if choice:
        shown = [example(one, schemas, depth + 1) for one in choice]
        return " | ".join(shown) if all(isinstance(one, str) for one in shown) else shown[0]
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if schema.get("type") == "array":
        return [example(schema.get("items"), schemas, depth + 1)]
    if "properties" in schema:
        required = schema.get("required", [])
        return {
            name if name in required else f"{name}?": example(value, schemas, depth + 1)
            for name, value in schema["properties"].items()
        }
    return schema.get("type", "any")


def only_required(schema: dict[str, Any] | None, schemas: dict[str, Any]) -> Any:
    """Return a body with the required fields, for the reader to fill in."""
    if schema and "$ref" in schema:
        return only_required(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if not schema or "properties" not in schema:
        return {}
    empty = {"string": "", "integer": 0, "number": 0, "boolean": False, "array": [], "object": {}}
    return {name: empty.get(schema["properties"][name].get("type")) for name in schema.get("required", [])}
