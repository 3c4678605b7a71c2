"""The live page at ``/``: its files, and what it shows as a document and as a stream."""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Request, Response
from fastapi.responses import StreamingResponse

from sidecar import __version__
from sidecar.api import models
from sidecar.api.dependencies import EVENT_STREAM, Overviews, event_stream
from sidecar.api.live import Live
from sidecar.api.overview import OverviewService
from sidecar.api.problems import Problem, responses
from sidecar.daemon.services import Services

TYPES = {
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "page.js": "text/javascript; charset=utf-8",
    "actions.js": "text/javascript; charset=utf-8",
    "elements.js": "text/javascript; charset=utf-8",
    "format.js": "text/javascript; charset=utf-8",
    "sections.js": "text/javascript; charset=utf-8",
    "timeline.js": "text/javascript; charset=utf-8",
}
"""The files that are served, and nothing else, with their media types."""
SECURITY = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""Nothing but the page's own files runs, nothing else is contacted, and no other page can embed it under its buttons."""
CACHED = {"cache-control": "no-cache"}
_LISTED = ("/v1/status", "/v1/overview", "/v1/checkpoints", "/v1/events", "/v1/live", "/metrics", "/openapi.json")

page = APIRouter(tags=["page"], responses=responses(403, 421, 422, 503))


async def _live(request: Request) -> Live:
    live: Live = request.app.state.live
    return live


def _of_types(*types: str) -> dict[int | str, dict[str, Any]]:
    """Describe the media types of a call's success."""
    return {200: {"content": {name.partition(";")[0]: {"schema": {"type": "string"}} for name in types}}}


@page.get("/", summary="The live page", response_class=Response, responses=_of_types("text/html", "text/plain"))
async def index(accept: Annotated[str, Header()] = "") -> Response:
    """HTML for a browser; for other clients a list of the calls to begin with."""
    more = {"vary": "accept"} | SECURITY | CACHED
    if "text/html" in accept:
        return Response(_file("index.html"), media_type="text/html; charset=utf-8", headers=more)
    listed = "\n".join(_LISTED)
    return Response(f"checkpoint-sidecar {__version__}\n\n{listed}\n", media_type="text/plain; charset=utf-8", headers=more)


@page.get(
    "/page/{name}",
    summary="A file of the live page",
    response_class=Response,
    responses=_of_types(*TYPES.values()) | responses(404),
)
async def file(name: str) -> Response:
    """Style, scripts and icon. They are part of the package: nothing is loaded from elsewhere."""
    if name not in TYPES:
        raise Problem(404, "No such file", f"{name[:80]!r} is no file of the page, which is at /")
    return Response(_file(name), media_type=TYPES[name], headers=SECURITY | CACHED)


@page.get("/v1/overview", summary="Everything the live page shows")
async def overview(overviews: Overviews) -> models.Overview:
    """One document with bounded lists. Reads nothing from the store; what the live page has read from it is included."""
    return overviews.overview()


@page.get("/v1/live", summary="The overview, whenever it changes", **EVENT_STREAM)
async def live(stream: Annotated[Live, Depends(_live)]) -> StreamingResponse:
    """Server-sent events ``overview`` with ``GET /v1/overview`` as data, at most two a second, at least one in five seconds.

    ``ended`` is the last event: the sidecar has ended. At most 8 viewers at once.
    """
    return event_stream(stream.stream())


def watch(app: FastAPI, services: Services) -> None:
    """Add the page to an application."""
    app.state.overviews = OverviewService(services)
    app.state.live = Live(services, app.state.overviews)
    app.include_router(page)


@functools.cache
def _file(name: str) -> bytes:
    return (files("sidecar.api") / "web" / name).read_bytes()
