"""Errors as RFC 9457 problem documents that say what to do."""

from __future__ import annotations

from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

log = structlog.get_logger()

MEDIA_TYPE = "application/problem+json"


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
    detail: str = Field(description="What was wrong and what to do")
    missing: list[Missing] | None = Field(None, description="What is not durable yet")


class Problem(Exception):
    """Ends a request with a problem document."""

    def __init__(self, status: int, title: str, detail: str, *, missing: list[Missing] | None = None) -> None:
        super().__init__(detail)
        self.document = ProblemDocument(title=title, status=status, detail=detail, missing=missing)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the entries of an OpenAPI description for errors of these statuses."""
    schema = {"$ref": "#/components/schemas/ProblemDocument"}
    return {status: {"model": ProblemDocument, "content": {MEDIA_TYPE: {"schema": schema}}} for status in statuses}


def install(app: FastAPI) -> None:
    """Make every error of an application a problem document."""

    @app.exception_handler(Problem)
    async def on_problem(_: Request, problem: Problem) -> JSONResponse:
        return _answer(problem.document)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return _answer(
            ProblemDocument(title="Invalid request", status=422, detail=f"{place}: {first['msg']}; see /openapi.json")
        )

    @app.exception_handler(HTTPException)
    async def on_http(_: Request, error: HTTPException) -> JSONResponse:
        detail = f"{error.detail}; /openapi.json lists every call"
        return _answer(ProblemDocument(title=str(error.detail), status=error.status_code, detail=detail))

    @app.exception_handler(Exception)
    async def on_mistake(request: Request, error: Exception) -> JSONResponse:
        log.error("api_call_failed", path=request.url.path, error=f"{type(error).__name__}: {error}")
        detail = f"{type(error).__name__}: {error}; the sidecar goes on, its log has more"
        return _answer(ProblemDocument(title="Internal error", status=500, detail=detail))


def _answer(document: ProblemDocument) -> JSONResponse:
    return JSONResponse(document.model_dump(exclude_none=True), status_code=document.status, media_type=MEDIA_TYPE)
