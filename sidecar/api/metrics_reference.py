"""The reference of the metrics, docs/metrics.md: ``python -m sidecar.api.metrics_reference > docs/metrics.md``."""

from __future__ import annotations

import sys

from sidecar.api.metrics import DESCRIPTIONS, PREFIX
from sidecar.catalog.durations import CALLS_S, TRANSFERS_S

_HEAD = """# Metrics

`GET /metrics` on the local API, and on `CKPT_METRICS_BIND` (`inject --metrics-port 9471`). A metric without a value is absent.
The dashboard and the alerts are in [deploy/monitoring](../deploy/monitoring), the runbooks in
[OPERATIONS.md](../OPERATIONS.md#alerts).
This page is made of the code: `python -m sidecar.api.metrics_reference > docs/metrics.md`.

| metric | type | labels | meaning |
| --- | --- | --- | --- |
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
How long nine of ten saves of a namespace take, at most:

```
histogram_quantile(0.9, sum by (le) (rate({PREFIX}save_seconds_bucket{{namespace="team-a"}}[1h])))
```
"""


def _bounds(bounds_s: tuple[float, ...]) -> str:
    return ", ".join(f"{bound_s:g}" for bound_s in bounds_s)


if __name__ == "__main__":
    sys.stdout.write(reference())
