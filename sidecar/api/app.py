"""The calls of the local API."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from typing import Annotated, Literal, NamedTuple

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse

from sidecar import __version__
from sidecar.api import metrics, models, views
from sidecar.api.flushing import Asked
from sidecar.api.problems import Problem, install, responses
from sidecar.core.lifecycle import Phase
from sidecar.core.resume import newest_first
from sidecar.events import Event
from sidecar.resume.downloader import Downloader
from sidecar.resume.resuming import LATEST
from sidecar.runtime import Runtime
from trainer_hook.contract import REQUEST, ContractError, is_checkpoint_name

WAIT_MAX_S = 60.0
STORE_PATIENCE_S = 20.0
"""How long a call waits for a store that does not answer: the threads belong to the uploads."""


def _runtime(request: Request) -> Runtime:
    runtime: Runtime = request.app.state.runtime
    return runtime


Running = Annotated[Runtime, Depends(_runtime)]


def _authorized(runtime: Running, authorization: Annotated[str | None, Header()] = None) -> None:
    if runtime.settings.api_token == "required" and not secrets.compare_digest(  # noqa: S105 - a mode, not a token
        (authorization or "").encode(), f"Bearer {runtime.token}".encode()
    ):
        raise Problem(
            401, "Token required", "send 'Authorization: Bearer' with the content of .ckpt/token on the shared volume"
        )


Changing = [Depends(_authorized)]
health = APIRouter(tags=["health"])
calls = APIRouter(tags=["checkpoints"])


@health.get("/healthz", summary="The process is alive")
async def healthz() -> models.Alive:
    """Answers as long as the event loop turns; says nothing about the store, so that an outage restarts nobody."""
    return models.Alive()


@health.get("/readyz", summary="Watching, and the store is reachable", responses=responses(503))
async def readyz(runtime: Running) -> models.Ready:
    """503 before the store was reached and while it is not; training does not depend on it."""
    if runtime.capabilities is None or runtime.health.trouble is not None:
        trouble = runtime.health.trouble or "the store was not reached yet"
        raise Problem(503, "Not ready", f"{trouble}; it is tried again, training goes on")
    return models.Ready(verification=runtime.capabilities.verification.value)


@health.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def prometheus(runtime: Running) -> Response:
    """Text format 0.0.4."""
    return Response(metrics.exposition(runtime), media_type="text/plain; version=0.0.4; charset=utf-8")


@calls.get("/", summary="Where to look", response_class=PlainTextResponse)
async def where_to_look() -> str:
    """A page for people who open the port in a browser."""
    return f"checkpoint-sidecar {__version__}\n\n/v1/status\n/v1/checkpoints\n/v1/events\n/metrics\n/openapi.json\n"


@calls.get("/v1/status", summary="Everything at one glance")
async def status(runtime: Running) -> models.Status:
    """Phase, queue, transfers, durable step, time at risk, throughput, disk, deadlines."""
    return views.status(runtime)


@calls.get("/v1/checkpoints", summary="All known checkpoints, newest first", responses=responses(503))
async def checkpoints(
    runtime: Running, where: Annotated[Literal["local", "store"] | None, Query()] = None
) -> models.Checkpoints:
    """``where=local`` needs no store; otherwise the store's commits are read."""
    found: dict[str, models.Checkpoint] = {}
    if where != "local":
        found = {c.name: c for c in await _stored(runtime)}
    if where != "store":
        for tracked in runtime.catalog.all():
            local, there = views.local_checkpoint(tracked), tracked.name in found
            found[tracked.name] = local.model_copy(update={"in_store": local.in_store or there})
    return models.Checkpoints(checkpoints=[found[name] for name in newest_first(found, and_final=True)])


@calls.get("/v1/checkpoints/{name}", summary="One checkpoint", responses=responses(404, 503))
async def checkpoint(runtime: Running, name: str) -> models.Checkpoint:
    """Looks on the volume first, then in the store."""
    if not is_checkpoint_name(name):
        raise Problem(404, "No such checkpoint", f"{name[:80]!r} is no checkpoint's name: checkpoint-<step> or final")
    tracked = runtime.catalog.get(name)
    if tracked is not None:
        return views.local_checkpoint(tracked)
    for stored in await _stored(runtime, only=name):
        return stored
    raise Problem(404, "No such checkpoint", f"{name} is neither on the volume nor committed in the store; see /v1/checkpoints")


@calls.post(
    "/v1/resume", status_code=202, dependencies=Changing, summary="Begin or join a resume", responses=responses(401, 422)
)
async def begin_resume(runtime: Running, wanted: models.ResumeRequest) -> models.Resume:
    """Poll ``GET /v1/resume?wait_s=`` for the outcome."""
    if wanted.checkpoint != LATEST and not is_checkpoint_name(wanted.checkpoint):
        raise Problem(
            422, "No such name", f"checkpoint is {wanted.checkpoint[:80]!r}: it must be latest, checkpoint-<step> or final"
        )
    share = wanted.share.core() if wanted.share else None
    return views.resume(runtime.resuming.request(wanted.checkpoint, wanted.train_call, share))


@calls.get("/v1/resume", summary="Progress of the resume")
async def resume(runtime: Running, wait_s: Annotated[float, Query(ge=0, le=WAIT_MAX_S)] = 0) -> models.Resume:
    """At the end the local path, or null with the reasons."""
    await runtime.unless_ended(runtime.resuming.progress(timeout_s=wait_s))
    return views.resume(runtime.resuming.status)


@calls.post(
    "/v1/flush", dependencies=Changing, summary="Wait until all that is finished is durable", responses=responses(401, 504)
)
async def flush(runtime: Running, wanted: models.FlushRequest) -> models.Flushed:
    """504 names what is missing when the time is over, and what was given up or lost while the call waited."""
    asked = Asked(runtime)
    in_time = True
    await runtime.unless_ended(runtime.look())
    try:
        async with asyncio.timeout(wanted.timeout_s):
            await runtime.unless_ended(asked.all_settled())
    except TimeoutError:
        in_time = False
    missing = asked.missing()
    if missing:
        trouble = f": {runtime.health.trouble}" if runtime.health.trouble else ""
        when = f"after {wanted.timeout_s} s" if not in_time else "and more will not become of them"
        names = ", ".join(m.checkpoint for m in missing[:8])
        hint = "uploads go on, ask again" if not in_time else "the log and /v1/checkpoints?where=local say why"
        raise Problem(504, "Not durable", f"{names}: not durable {when}{trouble}; {hint}", missing=missing)
    return models.Flushed(durable=[c.name for c in (await checkpoints(runtime, "local")).checkpoints if c.in_store])


@calls.post(
    "/v1/save",
    status_code=202,
    dependencies=Changing,
    summary="Ask the trainer to save now",
    responses=responses(401, 409, 503),
)
async def save(
    runtime: Running, wanted: models.SaveRequest, wait_s: Annotated[float, Query(ge=0, le=WAIT_MAX_S)] = 0
) -> models.Saving:
    """The hook saves at its next step; ``GET /v1/save/{id}`` says how far it is. 409 when no trainer with a hook is running."""
    if not runtime.volume.held_leases():
        raise Problem(
            409, "No trainer", "no training process with the hook holds a lease: start it with 'python -m trainer_hook run --'"
        )
    try:
        asked = runtime.saves.ask(stop=wanted.stop)
    except OSError as error:
        raise Problem(
            503,
            "Volume not writable",
            f"{REQUEST}: {error.strerror}; free space on the volume or mend its mount, then ask again",
        ) from None
    await runtime.unless_ended(runtime.saves.settled(asked, timeout_s=wait_s))
    return views.saving(runtime, asked)


@calls.get("/v1/save/{identifier}", summary="How far a save on request is", responses=responses(404))
async def saving(runtime: Running, identifier: str, wait_s: Annotated[float, Query(ge=0, le=WAIT_MAX_S)] = 0) -> models.Saving:
    """Waits up to ``wait_s`` until it is durable or failed."""
    asked = runtime.saves.get(identifier)
    if asked is None:
        raise Problem(404, "No such request", f"{identifier[:40]!r} was not asked for here, or long ago; POST /v1/save again")
    await runtime.unless_ended(runtime.saves.settled(asked, timeout_s=wait_s))
    return views.saving(runtime, asked)


@calls.post("/v1/bandwidth", dependencies=Changing, summary="Change the bandwidth limit at once", responses=responses(401, 422))
async def change_bandwidth(runtime: Running, wanted: models.BandwidthRequest) -> models.Bandwidth:
    """Until the sidecar ends; CKPT_BANDWIDTH_LIMIT is what it begins with."""
    runtime.transfers.gate.limit(wanted.limit)
    runtime.events.happened("bandwidth_limited", bytes_per_s=wanted.limit)
    return models.Bandwidth(limit_bytes_per_s=wanted.limit)


@calls.post(
    "/v1/room", dependencies=Changing, summary="Drop what is durable until so much is free", responses=responses(401, 422, 503)
)
async def make_room(runtime: Running, wanted: models.RoomRequest) -> models.Room:
    """Oldest first, and only durable ones: not what the run resumes from, nor what the script rotates itself."""
    try:
        deleted = await runtime.make_room(wanted.bytes) if runtime.make_room is not None else []
        return models.Room(free_bytes=runtime.volume.free_bytes(), deleted=deleted)
    except OSError as error:
        raise Problem(503, "Volume not readable", f"{error.strerror}: look at the volume's mount, then ask again") from None


@calls.post("/v1/drain", dependencies=Changing, summary="Termination has begun", responses=responses(401))
async def drain(runtime: Running, source: Literal["prestop", "api"] = "api") -> models.Draining:
    """Starts the clock of the grace period; returns at once."""
    if runtime.termination.notice(source):
        runtime.transfers.hurry()
        runtime.events.happened("termination_noticed", source=source)
    if runtime.phase in (Phase.STARTING, Phase.RUNNING):
        runtime.phase = Phase.DRAINING
    return models.Draining(phase=runtime.phase.value, deadline_in_s=round(runtime.termination.left_s() or 0.0, 3))


@calls.get(
    "/v1/events",
    summary="Every state change and progress, live",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def events(runtime: Running, last_event_id: Annotated[int | None, Header()] = None) -> StreamingResponse:
    """Server-sent events; a client that comes back with ``Last-Event-ID`` is given what it missed."""
    return StreamingResponse(
        _event_lines(runtime, last_event_id), media_type="text/event-stream", headers={"cache-control": "no-store"}
    )


async def _event_lines(runtime: Runtime, after: int | None) -> AsyncIterator[str]:
    yield ": connected\n\n"
    stream = runtime.events.stream(after)
    seen = runtime.events.newest if after is None else after
    while (waited := await runtime.unless_ended(_next_of(stream))) is not None:
        if waited.event is None:
            yield ": still here\n\n"
        else:
            seen = waited.event.number
            yield _event_line(waited.event)
    for event in runtime.events.after(seen):  # the last ones
        yield _event_line(event)


def _event_line(event: Event) -> str:
    return f"id: {event.number}\nevent: {event.name}\ndata: {json.dumps(event.fields)}\n\n"


class _Waited(NamedTuple):
    event: Event | None
    """``None`` is a heartbeat."""


async def _next_of(stream: AsyncIterator[Event | None]) -> _Waited:
    return _Waited(await anext(stream))


async def _stored(runtime: Runtime, only: str | None = None) -> list[models.Checkpoint]:
    downloader = runtime.resuming.downloader
    if downloader is None or runtime.health.trouble is not None:
        trouble = runtime.health.trouble or "it was not reached yet"
        raise Problem(503, "Store not reachable", f"{trouble}; where=local lists the volume alone")
    reading = asyncio.create_task(_commits(downloader, only))
    # Not awaited when it is cancelled: a request ends when its thread does.
    done, _ = await asyncio.wait({reading}, timeout=STORE_PATIENCE_S)
    if not done:
        reading.cancel()
        raise Problem(
            503, "Store not reachable", f"no answer within {STORE_PATIENCE_S:.0f} s; where=local lists the volume alone"
        )
    return reading.result()


async def _commits(downloader: Downloader, only: str | None) -> list[models.Checkpoint]:
    names = [only] if only else [n for n in await downloader.committed() if is_checkpoint_name(n)]
    found = []
    for name in names:
        try:
            commit = await downloader.commit(name)
        except ContractError:
            continue
        if commit is not None:
            found.append(views.stored_checkpoint(commit[0]))
    return found


def create_app(runtime: Runtime) -> FastAPI:
    """Return the whole API."""
    app = _app(runtime, "checkpoint-sidecar")
    app.include_router(calls)
    _prepare(app)
    return app


def create_metrics_app(runtime: Runtime) -> FastAPI:
    """Return what may be seen from outside the pod: metrics and the two health calls."""
    return _app(runtime, "checkpoint-sidecar metrics", openapi=False)


def _prepare(app: FastAPI) -> None:
    """Let FastAPI build its routes now: the first call, perhaps that of a dying pod, would hold the event loop for 25 ms."""
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []})


def _app(runtime: Runtime, title: str, *, openapi: bool = True) -> FastAPI:
    app = FastAPI(
        title=title, version=__version__, docs_url=None, redoc_url=None, openapi_url="/openapi.json" if openapi else None
    )
    app.state.runtime = runtime
    app.include_router(health)
    install(app)
    return app
