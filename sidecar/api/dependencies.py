"""What FastAPI passes to the routes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

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
