"""The webhook's HTTP side."""

from __future__ import annotations

import json
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sidecar.kubernetes.inject.fields import at
from sidecar.kubernetes.inject.options import Options
from sidecar.kubernetes.webhook.limits import BodyLimit, problem
from sidecar.kubernetes.webhook.review import NotAReview, answer

log = structlog.get_logger()


def create_app(defaults: Options) -> BodyLimit:
    """Return the application: ``POST /mutate`` for AdmissionReviews, ``GET /healthz`` for probes."""

    async def healthz(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def mutate(request: Request) -> Response:
        try:
            review = json.loads(await request.body())
            answered = answer(review, defaults)
            response = JSONResponse(answered)
        except NotAReview as error:
            return problem(400, "no AdmissionReview", str(error))
        except (ValueError, RecursionError):  # also half a surrogate pair, which JSON can escape and no answer can repeat
            return problem(400, "no AdmissionReview", "the body is no JSON")
        _log(review["request"], answered["response"])
        return response

    return BodyLimit(Starlette(routes=[Route("/healthz", healthz), Route("/mutate", mutate, methods=["POST"])]))


def _log(request: dict[str, Any], response: dict[str, Any]) -> None:
    fields = {
        "namespace": request.get("namespace"),
        "kind": at(request, "kind.kind"),
        "object": at(request, "object.metadata.name") or at(request, "object.metadata.generateName"),
    }
    if not response["allowed"]:
        log.warning("admission_refused", **fields, reason=response["status"]["message"])
    elif "patch" in response:
        log.info("sidecar_injected", **fields, warnings=len(response["warnings"]))
