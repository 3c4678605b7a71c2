"""The reference of the local HTTP API, made of its OpenAPI description."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from sidecar.api.app import calls, health
from sidecar.api.page import page as live_page

_HEAD = """# HTTP API

The sidecar serves it on `127.0.0.1:9470` (`CKPT_API_PORT`) and on the socket `.ckpt/api.sock`. Who may call it, limits and
errors are in [FORMAT.md](../../FORMAT.md#api): a `POST` needs `Content-Type: application/json`, errors are
`application/problem+json`. A sidecar itself serves this description: `curl http://127.0.0.1:9470/openapi.json`.
This page is made of the code: `make reference`.
"""


def page(description: dict[str, Any]) -> str:
    """Return docs/reference/http-api.md.

    Args:
        description: The OpenAPI document of the API.
    """
    text = _HEAD
    for path, methods in description["paths"].items():
        for method, call in methods.items():
            text += _call(method.upper(), path, call)
    text += "\n## Documents\n\nFields of requests and answers. Suffixes name units: `_s` seconds, `_bytes`, `_bytes_per_s`.\n"
    for name, schema in sorted(description["components"]["schemas"].items()):
        if "properties" in schema and name not in ("HTTPValidationError", "ValidationError"):
            text += _document(name, schema)
    return text


def description() -> dict[str, Any]:
    """Return the OpenAPI document."""
    app = FastAPI()
    for router in (health, calls, live_page):
        app.include_router(router)
    return app.openapi()


def _call(method: str, path: str, call: dict[str, Any]) -> str:
    text = f"\n## {method} {path}\n\n{call.get('summary', '')}. {_line(call.get('description', ''))}\n".replace("..", ".")
    parameters = [p for p in call.get("parameters", []) if p["in"] != "header"]
    if parameters:
        text += "\n| parameter | in | type |\n| --- | --- | --- |\n"
        text += "".join(f"| `{p['name']}` | {p['in']} | {_type(p['schema'])} |\n" for p in parameters)
    body = call.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    text += f"\nBody: {_type(body)}.\n" if body else ""
    answers = []
    for code, answer in call["responses"].items():
        schema = answer.get("content", {}).get("application/json", {}).get("schema")
        kind = f" ({_type(schema)})" if code.startswith("2") and schema else ""
        answers.append(f"{code}{kind}")
    return text + f"\nAnswers: {', '.join(answers)}.\n"


def _document(name: str, schema: dict[str, Any]) -> str:
    text = f"\n### {name}\n\n{_line(schema.get('description', ''))}\n\n| field | type | meaning |\n| --- | --- | --- |\n"
    for field, each in schema["properties"].items():
        text += f"| `{field}` | {_type(each)} | {_line(each.get('description', ''))} |\n"
    return text


def _type(schema: dict[str, Any] | None) -> str:
    if not schema:
        return "any"
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items'))}"
    return str(schema.get("type", "any"))


def _line(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")
