"""OpenTelemetry traces of checkpoints, where the extra ``otel`` is installed and an endpoint is set; else nothing is loaded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import structlog

from sidecar import __version__
from sidecar.core.lifecycle.checkpoint_trace import CheckpointTrace, CheckpointTraces, Span
from trainer_hook.contract import Node
from trainer_hook.contract.plain_text import plain_text

log = structlog.get_logger()

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
EVERY_MS = 1000
"""Interval at which spans are sent, unless ``OTEL_BSP_SCHEDULE_DELAY`` says otherwise: a pod may end within seconds."""


class Tracing:
    """Sends the trace of each checkpoint whose way ends. ``happened`` runs on the event loop; a thread of the SDK sends."""

    def __init__(self, environ: Mapping[str, str], *, pod: str, node: Node | None) -> None:
        """Raises ModuleNotFoundError where the extra is not installed."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        names = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        resource = {"service.instance.id": pod, "service.version": __version__}
        resource |= {} if names else {"service.name": "checkpoint-sidecar"}
        delay_ms = None if environ.get("OTEL_BSP_SCHEDULE_DELAY") else EVERY_MS
        # Not at the interpreter's end, which never comes: the process ends with os._exit.
        self._provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=delay_ms))
        self._tracer = self._provider.get_tracer("checkpoint-sidecar", __version__)
        self._node = {} if node is None else {"node.index": node.index, "node.count": node.count}
        self._traces = CheckpointTraces()

    def happened(self, name: str, fields: Mapping[str, Any]) -> None:
        """Take an event."""
        if (trace := self._traces.happened(name, fields, at_s=time.time())) is not None:
            self._record(trace)

    async def end(self, *, within_s: float) -> None:
        """Send the remaining spans, for at most ``within_s`` seconds."""
        flushing = asyncio.to_thread(self._provider.force_flush, max(1, int(within_s * 1000)))
        await asyncio.wait({asyncio.ensure_future(flushing)}, timeout=within_s)

    def _record(self, trace: CheckpointTrace) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        attributes = {**trace.attributes, **self._node}
        whole = self._tracer.start_span(trace.whole.name, attributes=attributes, start_time=_ns(trace.whole.begin_s))
        if trace.error is not None:
            whole.set_status(Status(StatusCode.ERROR, trace.error))
        context = set_span_in_context(whole)
        for part in trace.parts:
            self._record_part(part, context, attributes)
        whole.end(_ns(trace.whole.end_s))

    def _record_part(self, part: Span, context: Any, attributes: Mapping[str, Any]) -> None:
        span = self._tracer.start_span(part.name, context, attributes=attributes, start_time=_ns(part.begin_s))
        span.end(_ns(part.end_s))


def begin(environ: Mapping[str, str], *, pod: str, node: Node | None) -> Tracing | None:
    """Return what sends traces; ``None`` where ``OTEL_*`` does not ask for it, or where it cannot be done, which is logged."""
    endpoint = _first(environ, ENDPOINTS)
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    if not endpoint or is_off:
        return None
    if (protocol := _first(environ, PROTOCOLS) or PROTOCOL) != PROTOCOL:
        log.warning("traces_not_sent", hint=f"{PROTOCOLS[1]}={protocol}: only {PROTOCOL} is spoken here")
        return None
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # a receiver that is away costs no line each second
    try:
        tracing = Tracing(environ, pod=pod, node=node)
    except ModuleNotFoundError:
        log.warning("traces_not_sent", hint=f"{ENDPOINTS[1]} is set: pip install 'checkpoint-sidecar[otel]'")
        return None
    except Exception as error:  # of the SDK, which takes no value of some OTEL_* that is malformed or out of range
        log.warning(
            "traces_not_sent", error=plain_text(f"{type(error).__name__}: {error}"), hint="correct the OTEL_* variables"
        )
        return None
    log.info("traces_sent", endpoint=endpoint.partition("?")[0].rpartition("@")[2])
    return tracing


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := environ.get(name, "").strip())), "")


def _ns(epoch_s: float) -> int:
    return int(epoch_s * 1e9)
