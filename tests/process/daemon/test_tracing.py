"""Traces of checkpoints, as a receiver of OTLP over HTTP gets them from a real sidecar."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.process.sidecar_process import Sidecar, sidecar, until, write_checkpoint

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")


LOADED = "google/_upb"
"""Part of protobuf that is mapped in a process which sends traces."""


class Receiver(ThreadingHTTPServer):
    """Takes ``ExportTraceServiceRequest`` at ``/v1/traces``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[Any] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def resources(self) -> list[dict[str, Any]]:
        return [_values(spans.resource.attributes) for request in self.requests for spans in request.resource_spans]

    def spans(self, checkpoint: str) -> list[Any]:
        """Return the spans of a checkpoint in the order of their begin; the whole is the last of those that begin together."""
        found = [
            span
            for request in self.requests
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
            if _values(span.attributes)["checkpoint.name"] == checkpoint
        ]
        return sorted(found, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        import gzip

        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path == "/v1/traces":
            self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        return


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def mapped(running: Sidecar) -> str:
    """Return the files that a sidecar has mapped."""
    return Path(f"/proc/{running.process.pid}/maps").read_text()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@contextmanager
def traced(tmp_path: Path, endpoint: str, settings: Mapping[str, str] = {}) -> Iterator[Sidecar]:
    store = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    with sidecar(tmp_path / "volume", {**store, **settings}) as running:
        running.ready()
        yield running


def test_the_way_of_a_checkpoint_is_one_trace(tmp_path: Path, receiver: Receiver) -> None:
    with traced(tmp_path, receiver.endpoint) as running:
        (folder := running.volume / "checkpoint-20").mkdir()
        (folder / "model.safetensors").write_bytes(b"m" * 1000)
        time.sleep(0.2)  # the rest of the save
        (folder / ".complete").write_bytes(b"")
        until(lambda: len(receiver.spans("checkpoint-20")) >= 5)
        spans = receiver.spans("checkpoint-20")
        assert LOADED in mapped(running)
    assert sorted(span.name for span in spans) == ["checkpoint", "commit", "save", "scan", "upload"]
    whole = next(span for span in spans if span.name == "checkpoint")
    parts = [span for span in spans if span is not whole]
    assert {span.trace_id for span in spans} == {whole.trace_id}
    assert {span.parent_span_id for span in parts} == {whole.span_id}
    assert whole.start_time_unix_nano == parts[0].start_time_unix_nano
    assert whole.end_time_unix_nano == next(span for span in parts if span.name == "commit").end_time_unix_nano
    for span in spans:
        said = _values(span.attributes)
        assert (said["checkpoint.step"], said["checkpoint.size_bytes"], said["checkpoint.outcome"]) == (20, 1000, "committed")
    resource = receiver.resources()[0]
    assert resource["service.name"] == "checkpoint-sidecar"
    assert resource["service.instance.id"]


def test_the_last_checkpoint_of_a_pod_is_sent_before_it_ends(tmp_path: Path, receiver: Receiver) -> None:
    settings = {"OTEL_BSP_SCHEDULE_DELAY": "600000", "OTEL_SERVICE_NAME": "llama", "CKPT_GRACE_SECONDS": "30"}
    with traced(tmp_path, receiver.endpoint, settings) as running:
        write_checkpoint(running.volume, "checkpoint-7", {"model": b"m"})
        running.process.terminate()
        assert running.process.wait(timeout=60) == 0
    assert "checkpoint" in {span.name for span in receiver.spans("checkpoint-7")}
    assert receiver.resources()[0]["service.name"] == "llama"


def test_a_receiver_that_is_away_disturbs_nothing(tmp_path: Path) -> None:
    with traced(tmp_path, "http://127.0.0.1:1", {"CKPT_GRACE_SECONDS": "30"}) as running:
        write_checkpoint(running.volume, "checkpoint-7", {"model": b"m"})
        running.process.terminate()
        began_s = time.monotonic()
        assert running.process.wait(timeout=60) == 0
        assert time.monotonic() - began_s < 20
        assert "Traceback" not in running.log()
        assert running.events("traces_sent")[0]["endpoint"] == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    "off", [{"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, {"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}]
)
def test_nothing_is_sent_or_loaded_unless_it_is_asked_for(tmp_path: Path, receiver: Receiver, off: dict[str, str]) -> None:
    with traced(tmp_path, receiver.endpoint, off) as running:
        write_checkpoint(running.volume, "checkpoint-7", {"model": b"m"})
        until(lambda: running.events("checkpoint_committed"))
        assert LOADED not in mapped(running)
        running.process.terminate()
        assert running.process.wait(timeout=60) == 0
        assert not running.events("traces_sent")
    assert receiver.requests == []


def test_another_protocol_is_named(tmp_path: Path, receiver: Receiver) -> None:
    with traced(tmp_path, receiver.endpoint, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) as running:
        assert "http/protobuf" in until(lambda: running.events("traces_not_sent"))[0]["hint"]


@pytest.mark.parametrize("name", ["OTEL_BSP_SCHEDULE_DELAY", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"])
def test_a_variable_that_the_sdk_does_not_take_is_named_and_disturbs_nothing(
    tmp_path: Path, receiver: Receiver, name: str
) -> None:
    with traced(tmp_path, receiver.endpoint, {name: "-1"}) as running:
        assert "OTEL_*" in until(lambda: running.events("traces_not_sent"))[0]["hint"]
        write_checkpoint(running.volume, "checkpoint-7", {"model": b"m"})
        running.committed("checkpoint-7")
