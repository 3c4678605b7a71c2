"""What FastAPI passes to the routes, and what several of them answer with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import StreamingResponse

from sidecar.api.overview import OverviewService
from sidecar.daemon.services import Services


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Running = Annotated[Services, Depends(_services)]


async def _overviews(request: Request) -> OverviewService:
    service: OverviewService = request.app.state.overviews
    return service


Overviews = Annotated[OverviewService, Depends(_overviews)]

EVENT_STREAM: dict[str, Any] = {
    "response_class": StreamingResponse,
    "responses": {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
}
"""Arguments of the routes that answer with ``event_stream``."""


def event_stream(events: AsyncIterator[str]) -> StreamingResponse:
    """Answer with server-sent events."""
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
