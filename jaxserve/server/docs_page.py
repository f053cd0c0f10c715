"""The page `/docs`: the OpenAPI document for people. FastAPI's own pages load scripts from another origin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
:root {{ color-scheme: light dark; }}
code, h2 {{ font-family: ui-monospace, monospace; }}
h2 {{ font-size: 1.05rem; margin: 2rem 0 .3rem; }}
td {{ padding: 0 1rem 0 0; vertical-align: top; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{description} The same as a document: <a href="openapi.json">openapi.json</a>.</p>
"""


def write_page(document: Mapping[str, Any]) -> str:
    """Returns an OpenAPI document as HTML without scripts: each endpoint, the fields of its body, its statuses."""
    info = {name: escape(str(document["info"].get(name, ""))) for name in ("title", "description")}
    parts = [_HEAD.format(**info)]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _write_operation(document, f"{method.upper()} {path}", operation)
    return "\n".join((*parts, "</body>", "</html>", ""))


def _write_operation(document: Mapping[str, Any], name: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>{escape(name)}</h2>"
    yield f"<p>{escape(operation.get('description') or operation.get('summary') or '')}</p>"
    for content in operation.get("requestBody", {}).get("content", {}).values():
        schema = _find_schema(document, content["schema"])
        required = schema.get("required", ())
        rows = [
            f"<tr><td><code>{escape(field)}</code></td><td>{escape(_name_type(value))}</td>"
            f"<td>{'required' if field in required else ''}</td></tr>"
            for field, value in schema.get("properties", {}).items()
        ]
        yield f"<details><summary>{len(rows)} fields</summary><table>{''.join(rows)}</table></details>"
    yield f"<p>{escape(', '.join(operation.get('responses', ())))}</p>"


def _find_schema(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema, or the one that it refers to."""
    name = schema.get("$ref", "").rpartition("/")[2]
    found: Mapping[str, Any] = document["components"]["schemas"][name] if name else schema
    return found


def _name_type(schema: Mapping[str, Any]) -> str:
    """Returns the type of a field in a few words."""
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(map(_name_type, schema["anyOf"])))
    if schema.get("type") == "array":
        return f"list of {_name_type(schema.get('items', {}))}"
    return str(schema.get("type") or schema.get("$ref", "any").rpartition("/")[2])
