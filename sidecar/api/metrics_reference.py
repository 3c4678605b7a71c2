"""The reference of the metrics, docs/metrics.md, which ``make reference`` writes."""

from __future__ import annotations

from sidecar.api.metrics import DESCRIPTIONS, PREFIX
from sidecar.catalog.durations import CALLS_S, TRANSFERS_S

_HEAD = """# Metrics

`GET /metrics` on the local API, and on `CKPT_METRICS_BIND` (`inject --metrics-port 9471`). A metric without a value is absent.
The dashboard and the alerts are in [deploy/monitoring](../deploy/monitoring), the runbooks in
[OPERATIONS.md](../OPERATIONS.md#alerts).
This page is made of the code: `make reference`.

| metric | type | labels | meaning |
| --- | --- | --- | --- |
"""

_TRACES = """
## Traces

With the extra `otel` (`pip install 'checkpoint-sidecar[sidecar,otel]'`, or an image built with `--build-arg
EXTRAS=sidecar,otel`) and `OTEL_EXPORTER_OTLP_ENDPOINT` in the sidecar's environment, each checkpoint that the sidecar uploads
is one OpenTelemetry trace: the span `checkpoint` and its parts `save`, `scan` (from the marker until the sidecar has examined
it), `upload` and `commit`, with `checkpoint.name`, `.step`, `.size_bytes`, `.files`, `.save_reason`, `.attempt`, `.outcome` and
`node.index`. A checkpoint that was lost or given up is an error with its reason. What a pod sends last leaves before it ends.

The other standard variables apply, too: `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`,
`OTEL_SDK_DISABLED`, … Only `http/protobuf` is spoken. Without the endpoint nothing is loaded, and a receiver that is away
disturbs nothing.
"""


def reference() -> str:
    """Return the reference as Markdown."""
    rows = []
    for description in DESCRIPTIONS:
        name = f"{PREFIX}{description.name}" + ("_total" if description.kind == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in description.labels)
        rows.append(f"| `{name}` | {description.kind} | {labels} | {description.text} |\n")
    return _HEAD + "".join(rows) + _tail()


def _tail() -> str:
    return f"""
Bounds of the histograms in seconds: {_bounds(TRANSFERS_S)}; of `{PREFIX}api_request_seconds`: {_bounds(CALLS_S)}.
`reason` is `periodic`, `jit`, `manual`, `final` or `unknown` (a marker without one), `call` the method and route of the API.
A histogram is there with zeros before its first duration, but for calls of the API. How long nine of ten saves of a namespace
take, at most:

```
histogram_quantile(0.9, sum by (le) (rate({PREFIX}save_seconds_bucket{{namespace="team-a"}}[1h])))
```
{_TRACES}"""


def _bounds(bounds_s: tuple[float, ...]) -> str:
    return ", ".join(f"{bound_s:g}" for bound_s in bounds_s)
