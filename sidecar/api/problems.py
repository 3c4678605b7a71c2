"""Errors as RFC 9457 problem documents with a remedy."""

from __future__ import annotations

from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from trainer_hook.contract.plain_text import plain_text

log = structlog.get_logger()

MEDIA_TYPE = "application/problem+json"
_SCHEMAS = "#/components/schemas/{model}"


class Missing(BaseModel):
    """A checkpoint that is not durable."""

    checkpoint: str
    state: str
    reason: str | None = None
    sent_bytes: int | None = None
    size_bytes: int | None = None


class ProblemDocument(BaseModel):
    """RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = Field(description="The cause and the remedy")
    missing: list[Missing] | None = Field(None, description="Checkpoints that are not durable yet")


class Problem(Exception):
    """Ends a request with a problem document."""

    def __init__(self, status: int, title: str, detail: str, *, missing: list[Missing] | None = None) -> None:
        super().__init__(detail)
        self.document = ProblemDocument(title=title, status=status, detail=detail, missing=missing)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries of errors with these statuses."""
    # Without "model": with it FastAPI compiles a validator for each status of each route, twice, at every start.
    schema = {"$ref": _SCHEMAS.format(model=ProblemDocument.__name__)}
    return {status: {"content": {MEDIA_TYPE: {"schema": schema}}} for status in statuses}


def install(app: FastAPI) -> None:
    """Turn every error of an application into a problem document, also in its OpenAPI description."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        document = described()
        _, schemas = models_json_schema([(ProblemDocument, "validation")], ref_template=_SCHEMAS)
        document["components"]["schemas"] |= schemas["$defs"]
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend it

    @app.exception_handler(Problem)
    async def on_problem(_: Request, problem: Problem) -> JSONResponse:
        return answer(problem.document)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        # A field's name may be half a surrogate pair, which has no UTF-8.
        said = plain_text(f"{place}: {first['msg'].removeprefix('Value error, ')}")
        return answer(ProblemDocument(title="Invalid request", status=422, detail=f"{said}; see /openapi.json"))

    @app.exception_handler(HTTPException)
    async def on_http(_: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:  # of FastAPI, for a body that is no UTF-8 or nested too deep
            detail = "body: it is no JSON in UTF-8, or it is nested too deep; see /openapi.json"
            return answer(ProblemDocument(title="Invalid request", status=422, detail=detail))
        detail = f"{error.detail}; /openapi.json lists every call"
        return answer(ProblemDocument(title=str(error.detail), status=error.status_code, detail=detail))

    @app.exception_handler(Exception)
    async def on_mistake(request: Request, error: Exception) -> JSONResponse:
        log.error("api_call_failed", path=request.url.path, error=f"{type(error).__name__}: {error}")
        detail = f"{type(error).__name__}: {error}; the sidecar goes on, its log has more"
        return answer(ProblemDocument(title="Internal error", status=500, detail=detail))


def answer(document: ProblemDocument) -> JSONResponse:
    """Return a problem document as a response."""
    return JSONResponse(document.model_dump(exclude_none=True), status_code=document.status, media_type=MEDIA_TYPE)
