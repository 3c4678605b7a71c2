"""The webhook's HTTP side."""

from __future__ import annotations

from typing import Any

import structlog
from fastapi import Body, FastAPI, Response
from fastapi.responses import JSONResponse

from sidecar import __version__
from sidecar.kubernetes.inject.options import Options
from sidecar.kubernetes.webhook.limits import BodyLimit
from sidecar.kubernetes.webhook.review import NotAReview, answer

log = structlog.get_logger()


def create_app(defaults: Options) -> FastAPI:
    """Return the application: ``POST /mutate`` for AdmissionReviews, ``GET /healthz`` for probes."""
    app = FastAPI(title="checkpoint-sidecar webhook", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/mutate", response_model=None)
    async def mutate(review: Any = Body()) -> dict[str, Any] | Response:  # noqa: B008 - FastAPI's way
        try:
            answered = answer(review, defaults)
        except NotAReview as error:
            return JSONResponse({"title": "no AdmissionReview", "status": 400, "detail": str(error)}, 400)
        _log(review["request"], answered["response"])
        return answered

    return app


def _log(request: dict[str, Any], response: dict[str, Any]) -> None:
    metadata = (request.get("object") or {}).get("metadata") or {}
    fields = {
        "namespace": request.get("namespace"),
        "kind": (request.get("kind") or {}).get("kind"),
        "object": metadata.get("name") or metadata.get("generateName"),
    }
    if not response["allowed"]:
        log.warning("admission_refused", **fields, reason=response["status"]["message"])
    elif "patch" in response:
        log.info("sidecar_injected", **fields, warnings=len(response["warnings"]))
