"""Prometheus metrics, read from the running parts when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from sidecar.api import views
from sidecar.core.lifecycle import Phase
from sidecar.core.states import State
from sidecar.runtime import Runtime


class _Metrics(Collector):
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        runtime = self._runtime
        yield from self._gauges()
        yield _counter("sent_bytes", "Bytes that arrived in the store", runtime.transfers.sent_bytes)
        yield _counter("store_retries", "Requests to the store that were tried again", runtime.transfers.retries)
        states = Counter(t.state for t in runtime.catalog.all())
        by_state = GaugeMetricFamily("checkpoint_sidecar_checkpoints", "Checkpoints on the volume, by state", labels=["state"])
        for state in State:
            by_state.add_metric([state.value], states.get(state, 0))
        yield by_state
        phases = GaugeMetricFamily("checkpoint_sidecar_phase", "1 for the phase the sidecar is in", labels=["phase"])
        for phase in Phase:
            phases.add_metric([phase.value], float(phase is runtime.phase))
        yield phases

    def _gauges(self) -> Iterator[GaugeMetricFamily]:
        runtime, risk = self._runtime, self._runtime.risk()
        values: dict[tuple[str, str], float | None] = {
            ("degraded", "1 while the store cannot be used"): float(runtime.health.trouble is not None),
            ("newest_durable_step", "Newest step that is committed"): runtime.catalog.newest_durable_step,
            ("seconds_at_risk", "Training seconds that a kill now would cost"): risk.seconds_at_risk,
            ("steps_at_risk", "Steps that a kill now would cost"): risk.steps_at_risk,
            ("predicted_flush_seconds", "Seconds to make a checkpoint durable at the measured rate"): risk.predicted_flush_s,
            ("predicted_save_seconds", "Seconds from SIGTERM until a checkpoint is written"): risk.predicted_save_s,
            ("predicted_durable_seconds", "Seconds from SIGTERM until it is durable"): risk.predicted_durable_s,
            ("grace_seconds", "The grace period"): runtime.settings.grace_seconds,
            ("fits_grace", "1 while a just-in-time save fits the grace period"): risk.fits_grace,
            ("throughput_bytes_per_second", "Measured rate of uploads"): runtime.transfers.sent.bytes_per_s(),
            ("volume_free_bytes", "Free bytes of the shared volume"): views.volume(runtime).free_bytes,
            ("quarantined", "Committed checkpoints that failed verification"): len(runtime.resuming.quarantined),
        }
        for (name, text), value in values.items():
            if value is not None:
                yield GaugeMetricFamily(f"checkpoint_sidecar_{name}", text, value=float(value))


def exposition(runtime: Runtime) -> bytes:
    """Return the metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Metrics(runtime))
    return generate_latest(registry)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"checkpoint_sidecar_{name}", text, value=float(value))
