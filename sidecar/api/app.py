"""Routes of the local API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Literal, NamedTuple

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Response
from fastapi.responses import PlainTextResponse, StreamingResponse

from sidecar import __version__
from sidecar.api import metrics, models, views
from sidecar.api.dependencies import EVENT_STREAM, Overviews, Running, event_stream
from sidecar.api.flush_call import FlushCall
from sidecar.api.page import watch
from sidecar.api.problems import Problem, install, responses
from sidecar.api.stored import stored_checkpoints
from sidecar.catalog.events import Event
from sidecar.core.commit.resume import newest_first, steps_before
from sidecar.core.lifecycle.phases import Phase
from sidecar.daemon.services import Services
from sidecar.download.request import LATEST, AskedBy, ResumeStatus
from sidecar.download.resume_service import TooManyRequests
from sidecar.tasks import within
from trainer_hook.contract import REQUEST, is_checkpoint_name

WAIT_MAX_S = 60.0

WaitS = Annotated[float, Query(ge=0, le=WAIT_MAX_S)]


Authorization = Annotated[str | None, Header()]


async def _authorized(services: Running, authorization: Authorization = None) -> None:
    is_required = services.settings.api_token == "required"  # noqa: S105 - a mode, not a token
    if not services.token_file.accepts(authorization, is_required=is_required):
        hint = "send 'Authorization: Bearer' with the content of .ckpt/token on the shared volume"
        raise Problem(401, "Token required", hint)


async def _of_this_volume(services: Running, authorization: Authorization = None) -> None:
    if not services.token_file.accepts(authorization, is_required=False):
        raise Problem(
            401,
            "Wrong token",
            f"this sidecar's volume is {services.settings.dir}, the token is not that of its .ckpt/token: "
            "where several jobs run on one machine, give each a CKPT_API_PORT of its own",
        )


Changing = [Depends(_authorized)]
health = APIRouter(tags=["health"])
calls = APIRouter(
    tags=["checkpoints"], dependencies=[Depends(_of_this_volume)], responses=responses(401, 403, 408, 413, 421, 422, 503)
)


TRIED_AGAIN = "; it is tried again"
"""End of the text of most errors that pass by themselves."""


@health.get("/healthz", summary="The process is alive")
async def healthz() -> models.Alive:
    """Answers while the event loop runs, also during an outage of the store, which must not restart the container."""
    return models.Alive()


@health.get("/readyz", summary="Watching, and the store is usable", responses=responses(503))
async def readyz(services: Running) -> models.Ready:
    """503 while the store is not reachable or refuses a request again and again, and while the volume cannot be read.

    Training does not depend on it.
    """
    if services.scanner.volume_error is not None:
        raise Problem(503, "Not ready", f"the volume cannot be read ({services.scanner.volume_error}){TRIED_AGAIN}")
    if services.state.capabilities is None or services.health.trouble is not None:
        trouble = services.health.trouble or "the store was not reached yet"
        raise Problem(503, "Not ready", f"{trouble.removesuffix(TRIED_AGAIN)}{TRIED_AGAIN}, training goes on")
    lease = views.lease(services)
    if lease.reason is not None:
        raise Problem(503, "Not ready", lease.reason)
    return models.Ready(verification=services.state.capabilities.verification.value)


@health.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def prometheus(services: Running) -> Response:
    """Text format 0.0.4."""
    return Response(metrics.exposition(services), media_type="text/plain; version=0.0.4; charset=utf-8")


@calls.get("/v1/status", summary="Status of the sidecar")
async def status(services: Running, overviews: Overviews) -> models.Status:
    """Phase, queue, transfers, durable step, time at risk, throughput, disk, deadlines."""
    return views.status(services, overviews.overview().safety)


@calls.get("/v1/checkpoints", summary="All known checkpoints, newest first", responses=responses(503))
async def checkpoints(
    services: Running,
    where: Annotated[Literal["local", "store"] | None, Query()] = None,
    before_step: Annotated[int | None, Query(ge=0, description="Only lower steps")] = None,
    limit: Annotated[int | None, Query(ge=1, description="Number of the newest that are returned")] = None,
) -> models.Checkpoints:
    """``where=local`` needs no store; otherwise the commits in the store are read: use ``limit`` where there are thousands."""
    found: dict[str, models.Checkpoint] = {}
    if where != "local":
        found = {c.name: c for c in await stored_checkpoints(services, before_step=before_step, limit=limit)}
    if where != "store":
        for tracked in services.catalog.all():
            local, there = views.local_checkpoint(tracked), tracked.name in found
            found[tracked.name] = local.model_copy(update={"in_store": local.in_store or there})
    names = steps_before(newest_first(found, and_final=True), before_step)[:limit]
    bad = services.quarantine.quarantined
    return models.Checkpoints(checkpoints=[views.judged(found[name], bad) for name in names])


@calls.get("/v1/checkpoints/{name}", summary="One checkpoint", responses=responses(404, 503))
async def checkpoint(services: Running, name: str) -> models.Checkpoint:
    """Reads the volume first, then the store."""
    if not is_checkpoint_name(name):
        raise Problem(404, "No such checkpoint", f"{name[:80]!r} is no checkpoint's name: checkpoint-<step> or final")
    tracked = services.catalog.get(name)
    if tracked is not None:
        return views.judged(views.local_checkpoint(tracked), services.quarantine.quarantined)
    for stored in await stored_checkpoints(services, only=name):
        return stored
    raise Problem(404, "No such checkpoint", f"{name} is neither on the volume nor in the store: see ls, or /v1/checkpoints")


@calls.post(
    "/v1/resume", status_code=202, dependencies=Changing, summary="Begin or join a resume", responses=responses(401, 422, 429)
)
async def begin_resume(services: Running, wanted: models.ResumeRequest) -> models.Resume:
    """Poll ``GET /v1/resume/{id}?wait_s=`` for the answer to this request. The trainer's requests have priority."""
    if wanted.checkpoint != LATEST and not is_checkpoint_name(wanted.checkpoint):
        raise Problem(
            422, "No such name", f"checkpoint is {wanted.checkpoint[:80]!r}: it must be latest, checkpoint-<step> or final"
        )
    share = wanted.share.core() if wanted.share else None
    asked_by = AskedBy(wanted.asked_by) if wanted.asked_by else None
    try:
        return views.resume(services.resume_service.request(wanted.checkpoint, wanted.train_call, share, asked_by))
    except TooManyRequests:
        raise Problem(
            429, "Too many requests", "dozens of resumes wait for their answers: GET /v1/resume/{id} of those, then ask again"
        ) from None


@calls.get("/v1/resume", summary="Progress of the trainer's latest resume")
async def resume(services: Running, wait_s: WaitS = 0) -> models.Resume:
    """The result is the local path, or null with the reasons. Requests of people are read by their id."""
    await services.state.unless_ended(services.resume_service.progress(timeout_s=wait_s))
    return views.resume(services.resume_service.status() or ResumeStatus())


@calls.get("/v1/resume/{identifier}", summary="Progress of one resume", responses=responses(404))
async def one_resume(services: Running, identifier: str, wait_s: WaitS = 0) -> models.Resume:
    """The result is the local path, or null with the reasons. Waits up to ``wait_s`` for it."""
    await services.state.unless_ended(services.resume_service.progress(identifier, timeout_s=wait_s))
    asked = services.resume_service.status(identifier)
    if asked is None:
        raise Problem(
            404,
            "No such request",
            f"{identifier[:40]!r} is not a request of this sidecar process, or is too old; POST /v1/resume again",
        )
    return views.resume(asked)


@calls.post(
    "/v1/flush", dependencies=Changing, summary="Wait until all finished checkpoints are durable", responses=responses(401, 504)
)
async def flush(services: Running, wanted: models.FlushRequest) -> models.Flushed:
    """504 names the checkpoints not durable in time, lost or given up, and the newest one if it is rejected."""
    asked = FlushCall(services)
    in_time = await within(wanted.timeout_s, services.state.unless_ended(asked.all_settled()))
    missing = asked.missing()
    if missing:
        trouble = f": {services.health.trouble}" if services.health.trouble else ""
        when = f"after {wanted.timeout_s} s" if not in_time else "and their state is final"
        names = ", ".join(m.checkpoint for m in missing[:8])
        hint = "uploads go on, ask again" if not in_time else "the log and /v1/checkpoints?where=local say why"
        raise Problem(504, "Not durable", f"{names}: not durable {when}{trouble}; {hint}", missing=missing)
    return models.Flushed(durable=[c.name for c in (await checkpoints(services, "local")).checkpoints if c.in_store])


@calls.post(
    "/v1/save",
    status_code=202,
    dependencies=Changing,
    summary="Ask the trainer to save now",
    responses=responses(401, 409, 503),
)
async def save(services: Running, wanted: models.SaveRequest, wait_s: WaitS = 0) -> models.Saving:
    """The hook saves at its next step; ``GET /v1/save/{id}`` has the progress. 409 if no trainer with a hook is running."""
    if not services.volume.held_leases():
        raise Problem(
            409, "No trainer", "no training process with the hook holds a lease: start it with 'python -m trainer_hook run --'"
        )
    try:
        asked = services.save_requests.ask(stop=wanted.stop)
    except OSError as error:
        raise Problem(
            503,
            "Volume not writable",
            f"{REQUEST}: {error.strerror}; free space on the volume or mend its mount, then ask again",
        ) from None
    await services.state.unless_ended(services.save_requests.settled(asked, timeout_s=wait_s))
    return views.saving(services, asked)


@calls.get("/v1/save/{identifier}", summary="Progress of a save on request", responses=responses(404))
async def saving(services: Running, identifier: str, wait_s: WaitS = 0) -> models.Saving:
    """Waits up to ``wait_s`` until the save is durable or has failed."""
    asked = services.save_requests.get(identifier)
    if asked is None:
        raise Problem(
            404,
            "No such request",
            f"{identifier[:40]!r} is not a save request of this sidecar, or is too old; POST /v1/save again",
        )
    await services.state.unless_ended(services.save_requests.settled(asked, timeout_s=wait_s))
    return views.saving(services, asked)


@calls.post("/v1/bandwidth", dependencies=Changing, summary="Change the bandwidth limit at once", responses=responses(401, 422))
async def change_bandwidth(services: Running, wanted: models.BandwidthRequest) -> models.Bandwidth:
    """Valid until the sidecar ends; CKPT_BANDWIDTH_LIMIT is the limit at start."""
    services.executor.gate.limit(wanted.limit)
    services.events.happened("bandwidth_limited", bytes_per_s=wanted.limit)
    return models.Bandwidth(limit_bytes_per_s=wanted.limit)


@calls.post(
    "/v1/room",
    dependencies=Changing,
    summary="Delete durable local checkpoints to free space",
    responses=responses(401, 422, 503),
)
async def make_room(services: Running, wanted: models.RoomRequest) -> models.Room:
    """Deletes durable ones, oldest first; not the one that the run resumes from, nor those that the script rotates itself.

    If that is not enough, older ones go that wait for their upload and that the trainer has deleted, never the newest.
    """
    try:
        deleted = await services.volume_cleaner.make_room(wanted.bytes)
        return models.Room(free_bytes=services.volume.free_bytes(), deleted=deleted)
    except OSError as error:
        raise Problem(503, "Volume not readable", f"{error.strerror}: check the volume's mount, then ask again") from None


@calls.post("/v1/drain", dependencies=Changing, summary="Termination has begun", responses=responses(401))
async def drain(services: Running, source: Literal["prestop", "api"] = "api") -> models.Draining:
    """Starts the clock of the grace period; returns at once."""
    services.termination.notice(source)
    # The daemon changes the phase in its next cycle, as for every other notice.
    phase = Phase.DRAINING if services.state.phase in (Phase.STARTING, Phase.RUNNING) else services.state.phase
    return models.Draining(phase=phase.value, deadline_in_s=round(services.termination.deadline.left_s() or 0.0, 3))


@calls.get("/v1/events", summary="Every state change and progress, live", **EVENT_STREAM)
async def events(services: Running, last_event_id: Annotated[int | None, Header()] = None) -> StreamingResponse:
    """Server-sent events; a client that reconnects with ``Last-Event-ID`` gets the events that it missed."""
    return event_stream(_event_lines(services, last_event_id))


async def _event_lines(services: Services, after: int | None) -> AsyncIterator[str]:
    yield ": connected\n\n"
    stream = services.events.stream(after)
    seen = services.events.newest if after is None else after
    while (waited := await services.state.unless_ended(_next_of(stream))) is not None:
        if waited.event is None:
            yield ": still here\n\n"
        else:
            seen = waited.event.number
            yield _event_line(waited.event)
    for event in services.events.after(seen):  # the last ones
        yield _event_line(event)


def _event_line(event: Event) -> str:
    return f"id: {event.number}\nevent: {event.name}\ndata: {json.dumps(event.fields)}\n\n"


class _Waited(NamedTuple):
    event: Event | None
    """``None`` is a heartbeat."""


async def _next_of(stream: AsyncIterator[Event | None]) -> _Waited:
    return _Waited(await anext(stream))


def create_app(services: Services) -> FastAPI:
    """Return the whole API."""
    app = _app(services, "checkpoint-sidecar")
    app.include_router(calls)
    watch(app, services)
    _prepare(app)
    return app


def create_metrics_app(services: Services) -> FastAPI:
    """Return the API for clients outside the pod: metrics and the two health calls."""
    return _app(services, "checkpoint-sidecar metrics", openapi=False)


def _prepare(app: FastAPI) -> None:
    """Build FastAPI's routes now: otherwise the first call, perhaps a dying pod's, would block the event loop for 25 ms."""
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []})


def _app(services: Services, title: str, *, openapi: bool = True) -> FastAPI:
    app = FastAPI(
        title=title, version=__version__, docs_url=None, redoc_url=None, openapi_url="/openapi.json" if openapi else None
    )
    app.state.services = services
    app.include_router(health)
    install(app)
    return app
